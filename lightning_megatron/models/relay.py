"""A call of a whole model whose stages are on several ranks: each runs its part in turn and passes the hidden on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_megatron.groups.p2p import exchange
from lightning_megatron.models.stage import PipelinedModule, StageCursor, StageDone

T = TypeVar("T")


def run_in_turn(model: PipelinedModule, call: Callable[[], T]) -> T | None:
    """Call a model that is cut over pp, outside of a training or evaluation step and without gradients.

    Equal to the call of a model that is not cut. One stage works at a time: it is meant for what is rare, such as
    generating text, and not for throughput, which the schedule of steps gives.

    Args:
        model: The model; no step may be running.
        call: Calls it with this rank's inputs, which are the same on all stages.

    Returns:
        What the call returns, on the last stage; None on others.

    Communication: one hidden from each virtual stage to the next; call it on all ranks of pp.
    """
    axis, device = model.mesh.pp, model.mesh.device
    last = model.num_chunks - 1
    try:
        for chunk in range(model.num_chunks):
            cursor = model.cursor = StageCursor(chunk, probe=True)
            _stop(call)
            received = []
            if not model.is_first_stage(chunk):
                received = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in cursor.forms]
                exchange([], [(one, (axis.rank - 1) % axis.size) for one in received], axis).wait()
            cursor = model.cursor = StageCursor(chunk, received)
            if axis.is_last and chunk == last:
                return call()
            _stop(call)
            exchange([(one.contiguous(), (axis.rank + 1) % axis.size) for one in cursor.sent], [], axis).wait()
        return None
    finally:
        model.cursor = None


def _stop(call: Callable[[], object]) -> None:
    try:
        call()
    except StageDone:
        return
    raise AssertionError("a stage that is not the last ends its call early")
