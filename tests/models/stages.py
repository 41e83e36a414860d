"""Run the pipeline stages of a GPT one after the other, each rank its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import StageCursor, StageDone


def run_pipeline(model: GPT, tokens: Tensor, labels: Tensor, grad: Tensor, **others: Any) -> Tensor:
    """Run every virtual stage one after the other, forward and backward; return the losses on every
    rank.
    """
    mesh = model.mesh
    pp, stages = mesh.pp, mesh.pp.size * model.num_chunks
    model.cursor = StageCursor(0, probe=True)
    with pytest.raises(StageDone):
        model(tokens, labels, **others)
    ((shape, dtype),) = model.cursor.tensor_specs
    assert (shape, dtype) == model.boundary(labels), "a probe reports the boundary"
    inputs, outputs = {}, {}
    losses = torch.zeros(labels.shape, dtype=torch.float64)
    for stage in range(stages):
        chunk, owner = divmod(stage, pp.size)
        hidden = torch.zeros(shape, dtype=dtype)
        if stage and pp.rank == (stage - 1) % pp.size:
            hidden.copy_(outputs[(stage - 1) // pp.size].detach())
        if stage:
            torch.distributed.broadcast(hidden, pp.ranks[(stage - 1) % pp.size], group=pp.group)
        if pp.rank != owner:
            continue
        inputs[chunk] = hidden.requires_grad_() if stage else None
        model.cursor = StageCursor(chunk, [inputs[chunk]] if stage else [])
        try:
            outputs[chunk] = model(tokens, labels, label_smoothing=0.1, **others)
            losses = outputs[chunk].detach().clone()
        except StageDone:
            (outputs[chunk],) = model.cursor.sent
    for stage in reversed(range(stages)):
        chunk, owner = divmod(stage, pp.size)
        received = torch.zeros(shape, dtype=dtype)
        if stage < stages - 1:
            if pp.rank == (stage + 1) % pp.size:
                received.copy_(inputs[(stage + 1) // pp.size].grad)
            torch.distributed.broadcast(received, pp.ranks[(stage + 1) % pp.size], group=pp.group)
        if pp.rank == owner:
            outputs[chunk].backward(received if stage < stages - 1 else grad)
    model.cursor = None
    torch.distributed.broadcast(losses, pp.ranks[-1], group=pp.group)
    return losses


def join_tied_gradients(model: GPT, gradients: dict[str, Tensor]) -> None:
    """Add the gradients of a tied weight's two copies, and expect the same of both."""
    gradients["head.weight"] = gradients["embedding.word.weight"]
    if model.mesh.embedding.size > 1:
        ends = [
            p
            for key, p in model.named_parameters()
            if key in ("embedding.word.weight", "head.weight")
        ]
        torch.distributed.all_reduce(ends[0].grad, group=model.mesh.embedding.group)
