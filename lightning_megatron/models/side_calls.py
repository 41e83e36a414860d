"""Computations of all pipeline stages that a step asks for beside its calls of the model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.models.stage import PipelinedModule

T = TypeVar("T")


@dataclass
class SideCalls:
    """Results of the side calls of a step on one microbatch, in their order.

    Stages run a step at different times, and each of them runs a part of it. All of them therefore
    collect the results before the schedule starts, and a step then takes them one after the other.

    Args:
        results: Results that were collected.
        is_collecting: Whether the step runs on all stages at once, to collect results.
        num_taken: Results that the running step has taken.
    """

    results: list[Any]
    is_collecting: bool = False
    num_taken: int = 0


def run_aside(model: PipelinedModule, name: str, call: Callable[[], T]) -> T:
    """Return the result of a computation of all stages, such as text generation.

    Equals ``call()`` on one stage. Inside a step with pipeline stages ``call`` runs before the
    schedule does, with the arguments that it has when the step runs without values of the model.

    Args:
        model: Model that is cut into stages.
        name: What the user calls, for errors.
        call: Function of the computation. All ranks of pp call it together.

    Raises:
        UnsupportedError: Inside a step, if its arguments depend on results of the model, or if the
            first step of its kind has made no such call.
    """
    cursor = model.cursor
    if cursor is None:
        return call()
    calls = model.side_calls
    if calls is not None and calls.is_collecting:
        model.cursor = None
        try:
            result = call()
        finally:
            model.cursor = cursor
        calls.results.append(result)
        return deepcopy(result)
    if calls is None or calls.num_taken == len(calls.results):
        raise UnsupportedError(
            f"{name} in a step with pp ({model.mesh.pp.size}) above 1 must be called in the first "
            "step of its kind, too, and before any line that reads a value of the model's results: "
            "all stages compute it together before they run the step, without those values, and "
            "this call was not among theirs. Move it up, or call it in a hook such as "
            "on_validation_batch_end or on_validation_epoch_end, or use pp=1."
        )
    calls.num_taken += 1
    return deepcopy(calls.results[calls.num_taken - 1])
