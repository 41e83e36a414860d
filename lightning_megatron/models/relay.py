"""Sequential run of the stages of a pipelined model outside of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lightning_megatron.groups.pending import start_transfers
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone

T = TypeVar("T")


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
    try:
        call()
    except StageDone:
        return
    raise AssertionError("only the last stage runs its call to the end")
