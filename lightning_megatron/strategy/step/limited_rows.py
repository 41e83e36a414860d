"""Steps with a limit on the rows of expert buffers: a step that needs more rows runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.experts.transport.row_limit import RowLimit, RowNeed
from lightning_megatron.graphs.step_graph import RanStep
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.optimizer.step_gradients import StepGradients
from lightning_megatron.plan.experts import grown_factor, limited_rows, smallest_factor
from lightning_megatron.strategy.modules.module_state import (
    ModuleState,
    copies_of,
    copy_all_,
    own_parts,
)
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.process.random_states import DefaultGenerators
from lightning_megatron.strategy.step.run_graphs import RunGraphs
from lightning_megatron.strategy.step.step_values import MicrobatchOutputs, RunCall, StepCall

#: Number of the first failure after which the limit grows; it also grows after later ones.
_FAILURES_BEFORE_GROWTH = 2


class LimitedRows:
    """Training and evaluation steps whose experts have buffers with a limit on their rows.

    The first run of a step has the limit, eagerly or by graphs. After its last forward pass, each
    rank starts an all-reduce of the maximum number of missing rows. The host reads the result after
    it has queued the backward passes, which the device still runs. If a buffer was too small on any
    rank, all ranks undo the run and repeat the step eagerly without the limit, in memory outside
    the graphs. The random streams depend only on the position of the step, so they need no undo.

    The gradients of one batch cannot be removed from a sum with the gradients of earlier batches.
    With gradient accumulation, the second run therefore clears the sum and runs all batches of the
    optimizer step again, each from the state that the module had before that batch.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: ParallelMesh,
        limit: RowLimit,
        states: LayerStates,
        gradients: StepGradients,
        graphs: RunGraphs | None = None,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._limit = limit
        self._states = states
        self._gradients = gradients
        self._parts = own_parts(module)
        # Earlier batches of the optimizer step, whose gradients are in the accumulated sum.
        self._earlier: list[tuple[_Before, StepCall]] = []
        self._graphs = graphs
        #: Number of steps that ran again.
        self.num_failures = 0

    @property
    def factor(self) -> float:
        """Return the current limit on the rows of a buffer, as a multiple of the even share."""
        return self._limit.factor

    def run(self, inner: RunCall, call: StepCall) -> RanStep[MicrobatchOutputs]:
        """Run a step with the limit, and again without the limit if a buffer was too small.

        The hooks that clear the gradients of the previous step run once, before the first forward
        pass, because a second run must not undo their changes.

        Communication: one all-reduce of a number over the world on the device; if a buffer was too
            small also one gather of objects on the CPU, and that of the repeated runs: with
            gradient accumulation, of all batches of this optimizer step.
        """
        if call.passes is None:
            return self._run(inner, call, self._before())
        passes = call.passes.cleared()
        if not passes.adds:
            self._earlier.clear()
        call = replace(call, passes=passes)
        before = self._before()
        ran = self._run(inner, call, before)
        if passes.will_step:
            self._earlier.clear()
        else:
            self._earlier.append((before, call))
        return ran

    def _run(self, inner: RunCall, call: StepCall, before: _Before) -> RanStep[MicrobatchOutputs]:
        with self._limit.limit_rows():
            ran = inner(call)
        if not self._limit.was_too_small():
            return ran
        # The second run may need the memory that the outputs of the first run occupy.
        del ran
        if self._graphs is not None:
            self._graphs.suspend()
        try:
            self._undo(inner, call, before)
            with self._limit.measure_rows() as measured:
                ran = inner(replace(call, may_replay=False))
        except Exception as error:
            error.add_note(
                f"experts: experts.rows={self.factor:g} was too small for this step, which was "
                "being run again with the rows of the worst routing."
            )
            raise
        self._warn(measured.needs())
        return ran

    def _undo(self, inner: RunCall, call: StepCall, before: _Before) -> None:
        """Undo the first run of a call; the sum then has the gradients of earlier batches."""
        if call.passes is None:
            before.restore()
            return
        self._gradients.discard()
        for before_batch, batch in self._earlier:
            before_batch.restore()
            inner(replace(batch, may_replay=False))
        before.restore()
        self._states.resume_step()

    def _before(self) -> _Before:
        return _Before(
            ModuleState(self._module, self._parts),
            DefaultGenerators.now(self._mesh.device),
            self._states,
            copies_of(self._states.step_tensors),
        )

    def _warn(self, needs: Sequence[RowNeed]) -> None:
        """Warn of the buffer that needed the most rows, and let the limit grow on all ranks."""
        largest = max(needs, key=_over_share, default=None)
        gathered = all_gather_objects(largest, self._mesh.world_cpu)
        row_needs = [(need, rank) for rank, need in enumerate(gathered) if need is not None]
        need, rank = max(row_needs, key=lambda pair: _over_share(pair[0]))
        factor = self._limit.factor
        message = (
            f"experts: layer {need.layer} needed {need.rows:,} rows on rank {rank}, "
            f"experts.rows={factor:g} has {limited_rows(factor, need.share):,}: the step was run "
            f"again without a limit; {smallest_factor(need.rows, need.share):g} would be enough"
        )
        self.num_failures += 1
        if self.num_failures >= _FAILURES_BEFORE_GROWTH:
            self._limit.grow(grown_factor(need.rows, need.share))
            message += f", and experts.rows is {self._limit.factor:g} from now on"
            if self._graphs is not None:
                self._graphs.capture_again(f"experts.rows has grown to {self._limit.factor:g}")
        rank_zero_warn(f"{message}.", category=SpeedWarning)


def _over_share(need: RowNeed) -> float:
    """Return the needed rows as a multiple of the even share."""
    return need.rows / need.share


@dataclass(frozen=True)
class _Before:
    """State before a step that a second run restores; without gradients and random streams."""

    module: ModuleState
    generators: DefaultGenerators
    states: LayerStates
    copies: Sequence[torch.Tensor]

    def restore(self) -> None:
        """Restore the module, the default generators, and the state of the layers."""
        self.module.restore()
        self.generators.restore()
        copy_all_(self.states.step_tensors, self.copies)
