"""Steps of a run that CUDA graphs capture as a whole, in mode ``full``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.step_graph import CapturableStep, RanStep, StepGraphs
from lightning_megatron.graphs.user_hooks import find_refusal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.modules.module_state import ModuleState
from lightning_megatron.strategy.optimization.layer_states import LayerStates
from lightning_megatron.strategy.optimization.parameter_readers import first_overridden
from lightning_megatron.strategy.optimization.training_state import TrainingState
from lightning_megatron.strategy.step.step_values import (
    MicrobatchOutputs,
    RunCall,
    StepCall,
    TrainingPasses,
)

log = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0]


class WholeSteps:
    """Steps of a run as graphs, with the strategy's Python code around them.

    A graph starts with the gathers of updated parameters, for which layers wait. If the optimizer
    steps after the graph, the graph also sums gradients over the ranks, and updates routers and
    scales. Parameters are therefore not gathered right after an update, but when they are first
    read: by the next training step, or by other code before it.

    Unlike an eager step, a graph step clears the gradients of the previous step before the first
    forward pass.
    """

    def __init__(
        self, module: LightningModule, mesh: ParallelMesh, state: TrainingState, graphs: StepGraphs
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._state = state
        self._graphs = graphs
        self._factor: torch.Tensor | None = None
        state.main.gather.defers = True

    def run(self, inner: RunCall, call: StepCall) -> RanStep[MicrobatchOutputs]:
        """Run a step, by a graph if there is one.

        Communication: that of the step, of :meth:`ParameterGather.begin` and of
            :meth:`StepGraphs.run`.
        """
        if call.may_replay and call.passes is not None:
            ran = self._train(inner, call, call.passes)
        elif call.may_replay and not call.is_training and self._graphs.evaluates:
            ran = self._evaluate(inner, call)
        else:
            ran = self._run_eagerly(inner, call)
        if ran.is_new:
            self._name_numbers(call.name, ran.result)
        return ran

    def _run_eagerly(self, inner: RunCall, call: StepCall) -> RanStep[MicrobatchOutputs]:
        if call.is_training:
            self._state.main.gather.begin()
        return inner(call)

    def _train(
        self, inner: RunCall, call: StepCall, passes: TrainingPasses
    ) -> RanStep[MicrobatchOutputs]:
        gather = self._state.main.gather
        gather.defers = not self._graphs.is_off
        if passes.backward.inspector is not None or self._hook_in_backward is not None:
            return self._run_eagerly(inner, call)
        passes = passes.cleared()
        observer = passes.backward.observer
        sums = observer is not None and self._state.gradients.may_sum_in_graphs
        states = passes.states
        scale = self._static_factor(call.factor)
        backward = replace(passes.backward, observer=observer if sums else None)
        captured_passes = replace(passes, backward=backward)
        captured = replace(_unread(call), passes=captured_passes, factor=scale)
        call = replace(call, passes=passes)
        ran = self._graphs.run(
            CapturableStep(
                call.name,
                (call.divisor, passes.adds, isinstance(scale, torch.Tensor), self._module.training),
                call.microbatches,
                call.index,
                run_eagerly=lambda: self._run_eagerly(inner, call).result,
                run=lambda given: self._run_in_graph(
                    inner, replace(captured, microbatches=given), states, sums=sums
                ),
                holds_sums=sums,
                variant=(sums, gather.is_deferred, states is not None),
                prepare=gather.wait_for_started,
            )
        )
        if states is not None and ran.result.statistics is not None:
            states.adopt(ran.result.statistics)
        return ran

    def _run_in_graph(
        self, inner: RunCall, call: StepCall, states: LayerStates | None, *, sums: bool
    ) -> MicrobatchOutputs:
        """Run what a graph of a training step captures; ``states`` end their step in it."""
        gather = self._state.main.gather
        gather.begin()
        ran = inner(call).result
        gather.wait()
        if sums:
            self._state.reducer.sum_up()
        return ran if states is None else replace(ran, statistics=states.end_step())

    def _evaluate(self, inner: RunCall, call: StepCall) -> RanStep[MicrobatchOutputs]:
        captured = _unread(call)
        return self._graphs.run(
            CapturableStep(
                " ".join(map(str, call.key)),
                (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self._module.training),
                call.microbatches,
                call.index,
                run_eagerly=lambda: inner(call).result,
                run=lambda given: inner(replace(captured, microbatches=given)).result,
                prepare=self._state.main.wait,
            )
        )

    def _static_factor(self, factor: float | torch.Tensor) -> float | torch.Tensor:
        """Return the loss scale as one tensor for all steps, or as a number if it was always 1."""
        if factor == 1.0 and self._factor is None:
            return factor
        if self._factor is None:
            self._factor = torch.ones((), dtype=torch.float64, device=self._mesh.device)
        return self._factor.fill_(factor)

    @cached_property
    def _hook_in_backward(self) -> str | None:
        """Return a hook that reads each microbatch's loss, if any; replays would not call it."""
        hook = first_overridden(self._module.trainer, ("on_before_backward",))
        if hook is not None:
            reason = f"inside of which {hook} runs, which no replay calls"
            self._graphs.eager["training_step", reason] += 1
        return hook

    def _name_numbers(self, step: str, ran: MicrobatchOutputs) -> None:
        """Warn of log calls with plain numbers, because replays log the numbers of the capture."""
        numbers = ran.recorder.numbers
        if numbers and self._mesh.dp.rank == 0 and self._mesh.tp.rank == 0:
            log.warning(
                "CUDA graphs: %s logs numbers that are not tensors (%s). Replays log the numbers "
                "of the capture. Log tensors if the numbers change.",
                step,
                ", ".join(sorted(numbers)),
            )


@contextmanager
def refuse_kept_changes(module: nn.Module, step: str) -> Iterator[None]:
    """Refuse steps with Python effects that a replay would not repeat, and undo these effects.

    A replay runs no Python code, so it neither calls hooks of modules nor changes attributes.
    Changes of tensors in place are allowed, because replays repeat them.
    """
    refusal = find_refusal(module)
    if refusal is not None:
        raise UnsupportedError(f"no graph may hold a whole {step}: {refusal}")
    state = ModuleState(module)
    metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    updates = {name: metric._update_count for name, metric in metrics.items()}
    try:
        yield
        changed = state.changes()
        changed |= {
            f"self.{name}": "metric"
            for name, metric in metrics.items()
            if metric._update_count != updates[name]
        }
    finally:
        state.restore()
    if changed:
        (name, kind), *others = changed.items()
        more = f" and {len(others)} more" if others else ""
        raise UnsupportedError(
            f"a captured {step} must not change attributes of the module: it changes {name} "
            f"({kind}){more}. A replay runs no Python, so they would keep the values of "
            "the capture. Return such values from the step, log them as tensors, or change them in "
            "hooks such as on_train_batch_end."
        )


def attributes_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return copies of all attribute dictionaries, to keep alive the tensors that a graph reads.

    A later step may replace, for example, a table of rotary embeddings by one of another length.
    The graph still reads the old one.
    """
    attributes = []
    for part in module.modules():
        for held in (vars(part), part._buffers):
            attributes.append(dict(held))
            attributes += [dict(vars(value)) for value in held.values() if _is_user_object(value)]
    return attributes


def _is_user_object(value: Any) -> bool:
    is_module = isinstance(value, nn.Module | type)
    is_of_package = type(value).__module__.partition(".")[0] == _PACKAGE
    return is_of_package and not is_module and hasattr(value, "__dict__")


def _unread(call: StepCall) -> StepCall:
    """Replace the batch index in the arguments by an object whose value the step cannot read."""
    if not call.args or type(call.args[0]) is not int:
        return call
    return replace(call, args=(CapturedIndex(call.args[0]), *call.args[1:]))


_READS = tuple(
    """
    __bool__ __index__ __int__ __float__ __hash__ __repr__ __str__ __format__ __eq__
    __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__
    __rmul__ __neg__ __abs__ __floordiv__ __rfloordiv__ __truediv__ __rtruediv__
    __mod__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ __and__ __rand__ __or__
    __ror__ __xor__ __rxor__ __lshift__ __rshift__ __round__
    """.split()
)


class CapturedIndex(int):
    """Index that may be passed on, but not read: each replay would read that of the capture."""


def _refuse(index: CapturedIndex, *others: Any) -> NoReturn:
    raise UnsupportedError(
        "a captured step must not read the index of its batch: it computes with batch_idx, or "
        "compares or prints it. A replay runs no Python, so that it would use the index of the "
        "capture. Leave batch_idx to hooks such as on_train_batch_end."
    )


for _name in _READS:
    setattr(CapturedIndex, _name, _refuse)
