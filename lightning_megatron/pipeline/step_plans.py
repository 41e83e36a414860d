"""What steps pass between pipeline stages, found by trying them out without values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.stage import PipelinedModule, StageCursor
from lightning_megatron.models.step_plan import StepPlan, wrong_calls
from lightning_megatron.pipeline.microbatch import Microbatch

StepFn = Callable[[Any], Any]
BoundaryForm = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Trial:
    """Say how a step is tried out.

    Args:
        name: Names what the step does, alike in every run.
        keeps: Undoes, after the trial, what the step has changed beside the model.
    """

    name: Hashable = None
    keeps: Callable[[], AbstractContextManager[None]] = nullcontext


class StepPlans:
    """Find out, and remember by the names of steps, what they pass on.

    Args:
        call: Calls a step on a microbatch with the model set to a cursor; returns its result and whether it ran to its
            end.
    """

    def __init__(self, call: Callable[[StepFn, Microbatch, StageCursor], tuple[Any, bool]]) -> None:
        self._call = call
        self._known: dict[Hashable, StepPlan] = {}

    def of(self, trial: Trial, model: PipelinedModule, step_fn: StepFn, microbatch: Microbatch) -> StepPlan:
        """Return what stages pass on in a step; every rank finds it out by itself, without communication.

        Args:
            trial: Names the step; one without a name is tried out every time.
            model: The model that is cut into stages.
            step_fn: The step.
            microbatch: What it is tried out on.

        Raises:
            UnsupportedError: If the step does not call the model, or a stage reads what cannot travel.
        """
        if trial.name is None or trial.name not in self._known:
            cursor = StageCursor(chunk=0, probe=True, plan=None)
            with trial.keeps(), torch.no_grad():
                result = self._try_out(step_fn, microbatch, cursor)
                if cursor.calls == 0:
                    raise UnsupportedError(wrong_calls(1, 0))
                model.cursor = cursor
                try:
                    self._known[trial.name] = model.plan_of(cursor, result)
                finally:
                    model.cursor = None
        return self._known[trial.name]

    def _try_out(self, step_fn: StepFn, microbatch: Microbatch, cursor: StageCursor) -> Any:
        try:
            return self._call(step_fn, microbatch, cursor)[0]
        except Exception as error:
            # Code behind the model may do anything to tensors without values. The last stage will run it with values,
            # and refuse whatever has not been seen here.
            if isinstance(error, UnsupportedError) or not cursor.may_stop:
                raise
            return None

    def forms(self, step_fn: StepFn, microbatch: Microbatch, plan: StepPlan, chunk: int) -> list[BoundaryForm]:
        """Return shapes and types of what a chunk of this stage receives for a microbatch.

        The step is called up to the last call of the model, without values. Every rank can do so by itself because
        every rank of a data-parallel rank has the same microbatch.
        """
        cursor = StageCursor(chunk, probe=True, plan=plan)
        with torch.no_grad():
            _, ended = self._call(step_fn, microbatch, cursor)
        if ended:
            raise UnsupportedError(wrong_calls(plan.num_calls, cursor.calls))
        return cursor.forms


def form_of(node: Any) -> Any:
    """Describe the shapes and numbers in a nest of containers by a hashable value."""
    if isinstance(node, Tensor):
        return tuple(node.shape)
    if hasattr(node, "items"):
        return tuple((key, form_of(value)) for key, value in node.items())
    if isinstance(node, (list, tuple)):
        return tuple(form_of(value) for value in node)
    if hasattr(node, "__dataclass_fields__"):
        return tuple((name, form_of(getattr(node, name))) for name in node.__dataclass_fields__)
    return node if isinstance(node, (int, float)) else type(node)
