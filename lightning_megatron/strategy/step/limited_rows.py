"""Steps whose experts have buffers with a limit: a step that needed more rows is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.experts.routing.statistics import RunningSums
from lightning_megatron.experts.transport.row_limit import NeedsInFlight, RowLimit, RowNeed
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.plan.row_limit import enough_for, grown_factor, limited_rows
from lightning_megatron.strategy.modules.module_state import ModuleState, own_parts
from lightning_megatron.strategy.optimization.step_gradients import StepGradients
from lightning_megatron.strategy.process.random_states import (
    random_states,
    restore_random_states,
)
from lightning_megatron.strategy.step.step_values import BackwardPasses

_Ran = TypeVar("_Ran")
#: The limit grows at this failure and at all later ones.
_GROWS_FROM = 2


class LimitedRows:
    """Training and evaluation steps whose experts have buffers with a limit on their rows.

    The first run of a step has the limit. At the end of its last forward pass each rank starts a
    copy of the rows that its layers needed; the host reads it, and forms the maximum over all
    ranks, when it has queued the backward passes, which the device still runs. If a buffer was too
    small on any rank, all ranks undo the run and repeat it without the limit. The random streams of
    a step are functions of its position, so nothing of them has to be undone.

    Args:
        module: The user's module.
        mesh: The groups of this rank.
        limit: Limit of all layers.
        statistics: Statistics of this rank's experts, which the passes of a step add to.
        executor: Executor of the passes.
        gradients: Gradients of the trained parameters.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: ParallelMesh,
        limit: RowLimit,
        statistics: Sequence[RunningSums],
        executor: PipelineExecutor,
        gradients: StepGradients,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._limit = limit
        self._statistics = statistics
        self._executor = executor
        self._gradients = gradients
        self._parts = own_parts(module)
        #: Number of steps that were run again.
        self.num_failures = 0

    @property
    def factor(self) -> float:
        """Return the limit as it is now: rows of a buffer over an even share."""
        return self._limit.factor

    def train(
        self, run: Callable[[BackwardPasses | None], _Ran], passes: BackwardPasses | None
    ) -> _Ran:
        """Run a training step as :meth:`run` does.

        The hooks that clear the gradients of the previous step run before the first forward pass,
        once: what they change must not be undone.

        Args:
            run: Function that runs the step with these settings.
            passes: Settings of the backward passes; None computes no gradients.

        Communication: that of :meth:`run`.
        """
        if passes is None:
            return self.run(partial(run, None), partial(run, None))

        passes.clear_gradients()
        passes.hide_gradients()
        cleared = replace(passes, clear_gradients=lambda: None)

        def again() -> _Ran:
            self._gradients.discard()
            return run(cleared)

        return self.run(partial(run, cleared), again)

    def run(self, first: Callable[[], _Ran], again: Callable[[], _Ran]) -> _Ran:
        """Run a step with the limit, and once more without it if a buffer was too small.

        Args:
            first: Function that runs the step.
            again: Function that runs it a second time; state of the module and of the routers is
                again that of before.

        Returns:
            The result of the run that counts.

        Communication: one all-reduce of a number over the world on the CPU; if a buffer was too
            small also one gather of objects.
        """
        before = _Before(
            ModuleState(self._module, self._parts),
            random_states(self._mesh.device),
            [(layer, layer.sums.clone()) for layer in self._statistics],
        )
        reads: list[NeedsInFlight] = []
        with self._limit.limiting(), self._reading(reads):
            result = first()
        largest = self._largest(reads)
        ratio = torch.tensor(0.0 if largest is None else largest.rows / largest.share)
        if not all_reduce_(ratio.double(), self._mesh.world_cpu, "max").item():
            return result
        # Outputs of the first run may be large, and the worst case needs the memory.
        del result
        before.restore(self._mesh.device)
        self._warn(largest)
        return again()

    @contextmanager
    def _reading(self, reads: list[NeedsInFlight]) -> Iterator[None]:
        """Start to read what the layers need after the last forward pass inside the block."""
        self._executor.after_forwards = lambda: reads.append(self._limit.start_read())
        try:
            yield
        finally:
            self._executor.after_forwards = None

    def _largest(self, reads: list[NeedsInFlight]) -> RowNeed | None:
        """Return what exceeds the limit most on this rank; None if all rows have found room."""
        factor = self._limit.factor
        exceeding = [
            need
            for read in reads
            for need in read.wait()
            if need.rows > limited_rows(factor, need.share)
        ]
        return max(exceeding, key=lambda need: need.rows / need.share, default=None)

    def _warn(self, largest: RowNeed | None) -> None:
        """Name the buffer that was too small, and let the limit grow on all ranks alike."""
        found = [
            (need, rank)
            for rank, need in enumerate(all_gather_objects(largest, self._mesh.world_cpu))
            if need is not None
        ]
        need, rank = max(found, key=lambda pair: pair[0].rows / pair[0].share)
        factor = self._limit.factor
        words = (
            f"experts: layer {need.layer} needed {need.rows:,} rows on rank {rank}, "
            f"expert_rows={factor:g} has {limited_rows(factor, need.share):,}: the step was run "
            f"again without a limit; {enough_for(need.rows, need.share):g} would do"
        )
        self.num_failures += 1
        if self.num_failures >= _GROWS_FROM:
            self._limit.factor = grown_factor(need.rows, need.share)
            words += f", and expert_rows is {self._limit.factor:g} from now on"
        rank_zero_warn(f"{words}.", category=SpeedWarning)


@dataclass(frozen=True)
class _Before:
    """State before a step that a second run starts from, beside gradients and random streams."""

    module: ModuleState
    generators: dict[str, Any]
    statistics: list[tuple[RunningSums, torch.Tensor]]

    @torch.no_grad()
    def restore(self, device: torch.device) -> None:
        """Restore the module, the default generators and the statistics of experts."""
        self.module.restore()
        restore_random_states(self.generators, device)
        for layer, sums in self.statistics:
            layer.sums.copy_(sums)
