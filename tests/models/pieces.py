"""Run chunks piece by piece, like CUDA graphs, without an autograd graph between the pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.layers.segments import SegmentList, split
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.nest import leaves, rebuild


@dataclass
class Ran:
    """Piece that has run: its inputs, the leaves that replaced them, and its outputs."""

    sources: list[Tensor]
    copies: list[Tensor]
    outputs: list[Tensor]


class PieceRunner:
    """Runner of the chunks of a model, piece by piece, forward and backward."""

    def __init__(self, model: LayeredModule, **options: Any) -> None:
        self.model = model
        self.options = options
        self.pieces: list[SegmentList] = []
        model._run_chunk = self.run  # type: ignore[method-assign]

    def run(self, chunk: int, values: Mapping[str, Any]) -> Any:
        self.pieces = split(self.model.segments(chunk), **self.options)
        held = dict(values)
        ran: list[Ran] = []
        for piece in self.pieces:
            sources = [held[name] for name in piece.inputs]
            copies = tuple(map(detached, sources))
            found = piece(copies)
            ran.append(Ran(*map(floats_in, (sources, copies, found))))
            held.update(zip(piece.outputs, found, strict=True))
        (name,) = self.model.segments(chunk).outputs
        result = detached(held[name])
        for source, copy in zip(floats_in(held[name]), floats_in(result), strict=True):
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(
                    lambda found, source=source: run_backward(ran, source, found.grad)
                )
        return result


def floats_in(value: Any) -> list[Tensor]:
    return [one for _, one in leaves(value) if isinstance(one, Tensor) and one.is_floating_point()]


def detached(value: Any) -> Any:
    """Return a nest whose tensors are replaced by leaves of autograd."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return rebuild(value, detached)


def run_backward(ran: Sequence[Ran], result: Tensor, gradient: Tensor) -> None:
    """Run the backward pass piece by piece, and pass gradients to the inputs of the chunk."""
    gradients: dict[int, Tensor] = {id(result): gradient}
    for piece in reversed(ran):
        reached = [one for one in piece.outputs if id(one) in gradients and one.requires_grad]
        torch.autograd.backward(reached, [gradients.pop(id(one)) for one in reached])
        for source, copy in zip(piece.sources, piece.copies, strict=True):
            if copy.grad is not None:
                before = gradients.get(id(source))
                gradients[id(source)] = copy.grad if before is None else before + copy.grad
    for source in {id(one): one for piece in ran for one in piece.sources}.values():
        if id(source) in gradients and source.requires_grad:
            source.backward(gradients[id(source)])
