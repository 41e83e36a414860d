"""Computations that need all pipeline stages: inside a step, and outside of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.pending import start_transfers
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone

T = TypeVar("T")


@dataclass
class SideCalls:
    """Results of the side calls of a step on one microbatch, in order.

    A side call is a computation that needs all stages, such as text generation. Stages run a step
    at different times, and each stage runs only a part of it. All stages therefore compute the side
    calls together before the schedule starts, and the step then takes the results in order.

    Args:
        is_collecting: Whether all stages run the step together to collect results.
        num_taken: Number of results that the running step has taken.
    """

    results: list[Any]
    is_collecting: bool = False
    num_taken: int = 0


def run_side_call(model: PipelinedModule, name: str, call: Callable[[], T]) -> T:
    """Return the result of a computation that needs all stages, such as text generation.

    Equal to ``call()`` on one stage. Inside a step with pipeline stages, all stages run ``call``
    before the schedule, during a run of the step without values of the model.

    Args:
        name: Name of the function that the user calls, for errors.
        call: Function that all ranks of pp call together.

    Raises:
        UnsupportedError: Inside a step, if the call follows a line that reads a value of the
            model's results, or if the first step of the same kind (such as validation) did not make
            this call.
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
            "step of its kind, too, and before any line that reads a value of the model's results, "
            "because all stages compute it together before they run the step: they did not compute "
            "this call. Move it up, or call it in a hook such as on_validation_batch_end or "
            "on_validation_epoch_end, or use pp=1."
        )
    calls.num_taken += 1
    return deepcopy(calls.results[calls.num_taken - 1])


def run_stage_by_stage(model: PipelinedModule, call: Callable[[], T]) -> T | None:
    """Call a pipelined model outside of a training or evaluation step, without gradients.

    The result equals that of the model on one rank. Only one stage works at a time, so this
    function is meant for rare calls such as text generation. A schedule overlaps the stages of
    steps instead.

    Args:
        model: Pipelined model; no step may be running.
        call: Function that calls the model with inputs that are the same on all stages.

    Returns:
        Result of ``call`` on the last virtual stage; None on other stages.

    Communication: point-to-point transfers of hidden states from each virtual stage to the next.
        All ranks of pp must call this function.
    """
    axis = model.mesh.pp
    device = model.mesh.device
    placement = model.mesh.layout.placement
    sent: list[Tensor] = []
    result: T | None = None
    try:
        for chunk in range(model.num_chunks):
            # The shapes of the tensors to receive are known after a run without values.
            cursor = model.cursor = StageCursor(chunk, probe=True)
            _stop(call)
            virtual = placement.virtual_stage(axis.rank, chunk)
            received = sent
            if virtual > 0 and (source := placement.owner(virtual - 1)[0]) != axis.rank:
                received = [
                    torch.empty(shape, dtype=dtype, device=device)
                    for shape, dtype in cursor.tensor_specs
                ]
                start_transfers([], [(tensor, source) for tensor in received], axis).wait()
            cursor = model.cursor = StageCursor(chunk, received)
            if model.is_last_stage(chunk):
                result = call()
                break
            _stop(call)
            sent = [tensor.contiguous() for tensor in cursor.sent]
            # If chunks lie in a V, the next chunk may be on this stage, and uses the tensors
            # directly.
            if (target := placement.owner(virtual + 1)[0]) != axis.rank:
                start_transfers([(tensor, target) for tensor in sent], [], axis).wait()
        return result
    finally:
        model.cursor = None


def _stop(call: Callable[[], object]) -> None:
    """Run a call that ends where the stage does."""
    try:
        call()
    except StageDone:
        return
    raise AssertionError("only the last stage runs its call to the end")
