"""Runner of chunks in pieces, like CUDA graphs, without an autograd graph between the pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.graphs.model_segments import chunk_segments, chunk_values
from lightning_megatron.graphs.segments import SegmentList, split
from lightning_megatron.models.layered import LayeredModule, LayerInputs
from lightning_megatron.nest import leaves, rebuild


@dataclass
class PieceRun:
    """Completed run of a piece: its inputs, the leaves that replaced them, and its outputs."""

    sources: list[Tensor]
    copies: list[Tensor]
    outputs: list[Tensor]


class PieceRunner:
    """Runner of the chunks of a model, piece by piece, forward and backward."""

    def __init__(self, model: LayeredModule, **options: Any) -> None:
        self.options = options
        self.pieces: list[SegmentList] = []
        model.runner = self

    def run(
        self,
        model: LayeredModule,
        chunk: int,
        hidden: Tensor | None,
        call: Any,
        layers: Mapping[int, LayerInputs],
    ) -> Any:
        segments = chunk_segments(model, chunk)
        self.pieces = split(segments, **self.options)
        tensors_by_name = chunk_values(model, hidden, call, layers)
        piece_runs: list[PieceRun] = []
        for piece in self.pieces:
            sources = [tensors_by_name[name] for name in piece.inputs]
            copies = tuple(map(detach_leaves, sources))
            outputs = piece(copies)
            piece_runs.append(PieceRun(*map(float_tensors_in, (sources, copies, outputs))))
            tensors_by_name.update(zip(piece.outputs, outputs, strict=True))
        (name,) = segments.outputs
        result = detach_leaves(tensors_by_name[name])
        for source, copy in zip(
            float_tensors_in(tensors_by_name[name]), float_tensors_in(result), strict=True
        ):
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(
                    lambda leaf, source=source: run_backward(piece_runs, source, leaf.grad)
                )
        return result


def float_tensors_in(value: Any) -> list[Tensor]:
    return [
        leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def detach_leaves(value: Any) -> Any:
    """Return a nest whose tensors are replaced by leaves of autograd."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return rebuild(value, detach_leaves)


def run_backward(piece_runs: Sequence[PieceRun], result: Tensor, gradient: Tensor) -> None:
    """Run the backward pass piece by piece, and pass gradients to the inputs of the chunk."""
    gradients: dict[int, Tensor] = {id(result): gradient}
    for piece_run in reversed(piece_runs):
        outputs = [
            output
            for output in piece_run.outputs
            if id(output) in gradients and output.requires_grad
        ]
        torch.autograd.backward(outputs, [gradients.pop(id(output)) for output in outputs])
        for source, copy in zip(piece_run.sources, piece_run.copies, strict=True):
            if copy.grad is not None:
                sum_so_far = gradients.get(id(source))
                gradients[id(source)] = copy.grad if sum_so_far is None else sum_so_far + copy.grad
    for source in {
        id(tensor): tensor for piece_run in piece_runs for tensor in piece_run.sources
    }.values():
        if id(source) in gradients and source.requires_grad:
            source.backward(gradients[id(source)])
