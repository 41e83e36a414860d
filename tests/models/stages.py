"""Pipeline that runs the stages of a GPT one after the other, each on its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import StageCursor, StageDone


def run_pipeline(
    model: GPT, tokens: Tensor, labels: Tensor, grad: Tensor, **options: Any
) -> Tensor:
    """Run the forward and backward pass of every virtual stage; return the losses on every rank."""
    mesh = model.mesh
    pp, placement = mesh.pp, mesh.layout.placement
    stages = placement.num_virtual_stages
    model.cursor = StageCursor(0, probe=True)
    with pytest.raises(StageDone):
        model(tokens, labels, **options)
    ((shape, dtype),) = model.cursor.tensor_specs
    assert (shape, dtype) == model.boundary(labels), "a probe reports the boundary"
    inputs, outputs = {}, {}
    losses = torch.zeros(labels.shape, dtype=torch.float64)

    def broadcast_from(stage: int, get_tensor: Callable[[int], Tensor]) -> Tensor:
        """Return, on every rank, the tensors that a virtual stage sends to its neighbour."""
        owner, chunk = placement.owner(stage)
        result = torch.zeros(shape, dtype=dtype)
        if pp.rank == owner:
            result.copy_(get_tensor(chunk))
        torch.distributed.broadcast(result, pp.ranks[owner], group=pp.group)
        return result

    for stage in range(stages):
        owner, chunk = placement.owner(stage)
        received = []
        if stage:
            received = [broadcast_from(stage - 1, lambda chunk: outputs[chunk].detach())]
        if pp.rank != owner:
            continue
        inputs[chunk] = [tensor.requires_grad_() for tensor in received]
        model.cursor = StageCursor(chunk, received)
        try:
            outputs[chunk] = model(tokens, labels, label_smoothing=0.1, **options)
            losses = outputs[chunk].detach().clone()
        except StageDone:
            (outputs[chunk],) = model.cursor.sent
    for stage in reversed(range(stages)):
        owner, chunk = placement.owner(stage)
        gradient = grad
        if stage < stages - 1:
            gradient = broadcast_from(stage + 1, lambda chunk: inputs[chunk][0].grad)
        if pp.rank == owner:
            outputs[chunk].backward(gradient)
    model.cursor = None
    torch.distributed.broadcast(losses, pp.ranks[mesh.layout.loss_stage], group=pp.group)
    return losses


def join_tied_gradients(model: GPT, gradients: dict[str, Tensor]) -> None:
    """Sum the gradients of both copies of a tied weight, and expect the same gradient for both names."""
    gradients["head.weight"] = gradients["embedding.word.weight"]
    if model.mesh.embedding.size > 1:
        tied_parameters = [
            p
            for key, p in model.named_parameters()
            if key in ("embedding.word.weight", "head.weight")
        ]
        torch.distributed.all_reduce(tied_parameters[0].grad, group=model.mesh.embedding.group)
