"""Step plans, found by probes: runs of the user's step on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.side_calls import SideCalls
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StepPlan, wrong_calls
from lightning_megatron.nest import children
from lightning_megatron.pipeline.microbatch import Microbatch

StepFn = Callable[[Any], Any]
TensorSpec = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Trial:
    """Settings for the probe of a step.

    Args:
        name: Name of the kind of step. Steps with the same name share one plan; None means a step
            without a name, which is probed every time.
        preserve_state: Function that returns a context manager, which undoes the side effects of
            the step outside of the model.
    """

    name: Hashable = None
    preserve_state: Callable[[], AbstractContextManager[None]] = nullcontext


class StepPlans:
    """Step plans, cached by the names of steps.

    Args:
        call: Function that calls a step on a microbatch, with the model set to a cursor if there is
            one. The function returns the step's result, and whether the step ran to its end.
    """

    def __init__(
        self, call: Callable[[StepFn, Microbatch, StageCursor | None], tuple[Any, bool]]
    ) -> None:
        self.call = call
        self._plans: dict[Hashable, StepPlan] = {}
        #: Names of steps that request computations on all stages.
        self._asking: set[Hashable] = set()
        #: Results of these computations in the running step, by the ``id`` of each microbatch.
        self._collected: dict[int, list[Any]] = {}
        self._is_collecting = False

    def of(
        self, trial: Trial, model: PipelinedModule, step_fn: StepFn, microbatch: Microbatch
    ) -> StepPlan:
        """Return the plan of a step, which every rank derives without communication.

        Args:
            trial: Settings of the probe. A step without a name is probed every time.
            model: Model that is cut into stages.
            step_fn: The user's step.
            microbatch: Microbatch for the probe.

        Raises:
            UnsupportedError: If the step does not call the model, or a stage reads a value that
                cannot be sent between stages.
        """
        if trial.name is None or trial.name not in self._plans:
            cursor = StageCursor(chunk=0, probe=True, plan=None)
            with trial.preserve_state(), torch.no_grad():
                with self._collecting([microbatch]):
                    result = self._run_probe(step_fn, microbatch, cursor)
                self._asking.discard(trial.name)
                if self._collected[id(microbatch)]:
                    self._asking.add(trial.name)
                if cursor.calls == 0:
                    raise UnsupportedError(wrong_calls(1, 0))
                model.cursor = cursor
                try:
                    self._plans[trial.name] = model.plan_of(cursor, result)
                finally:
                    model.cursor = None
        return self._plans[trial.name]

    def collect(
        self,
        trial: Trial,
        step_fn: StepFn,
        microbatches: Sequence[Microbatch],
        seek: Callable[[int], None],
    ) -> None:
        """Run the computations on all stages that a step requests, such as generation.

        All stages run the step without values, so all of them make these calls.

        Args:
            trial: Settings of the probe.
            step_fn: The user's step.
            microbatches: Microbatches of the run.
            seek: Function that moves the random streams to the start of a microbatch.

        Communication: that of the calls, which all ranks of pp make.
        """
        if trial.name not in self._asking:
            self._collected = {}
            return
        with trial.preserve_state(), torch.no_grad(), self._collecting(microbatches):
            for number, microbatch in enumerate(microbatches):
                seek(number)
                self._run_probe(step_fn, microbatch, StageCursor(chunk=0, probe=True, plan=None))

    def side_calls_of(self, microbatch: Microbatch) -> SideCalls:
        """Return the computations on all stages that the running step requested for a microbatch.

        Args:
            microbatch: Microbatch of the running step.
        """
        return SideCalls(self._collected.get(id(microbatch), []), self._is_collecting)

    @contextmanager
    def _collecting(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        self._collected = {id(microbatch): [] for microbatch in microbatches}
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def _run_probe(self, step_fn: StepFn, microbatch: Microbatch, cursor: StageCursor) -> Any:
        try:
            return self.call(step_fn, microbatch, cursor)[0]
        except Exception as error:
            # Code after the model may fail on tensors without values, which is not an error. The
            # last stage runs it with values, and raises if it reads a value of another stage that
            # the probe did not find.
            if isinstance(error, UnsupportedError) or not cursor.may_stop:
                raise
            return None

    def tensor_specs(
        self, step_fn: StepFn, microbatch: Microbatch, plan: StepPlan, chunk: int
    ) -> list[TensorSpec]:
        """Return shapes and dtypes of the tensors that a chunk receives for a microbatch.

        The step runs without values up to its last call of the model. This needs no communication,
        because all ranks of a data-parallel rank have the same microbatch.
        """
        cursor = StageCursor(chunk, probe=True, plan=plan)
        with torch.no_grad():
            _, ended = self.call(step_fn, microbatch, cursor)
        if ended:
            raise UnsupportedError(wrong_calls(plan.num_calls, cursor.calls))
        return cursor.tensor_specs


def signature_of(node: Any) -> Any:
    """Return a hashable description of the shapes and numbers in a nest of containers."""
    if isinstance(node, Tensor):
        return tuple(node.shape)
    # Some containers have items without being mappings, such as a TensorDict.
    parts = children(dict(node.items()) if hasattr(node, "items") else node)
    if parts is not None:
        return tuple((suffix, signature_of(value)) for suffix, value in parts)
    return node if isinstance(node, (int, float)) else type(node)
