"""Sums of gradients that are partial over the tensor axis: norms, copied key and value heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec
from lightning_megatron.shapes import Shaped
from lightning_megatron.training.shared_gradients import overlapping_pieces

GradientOf = Callable[[str], Tensor]


@dataclass(frozen=True)
class _Segment:
    """Segment of a gradient that several ranks have.

    Args:
        name: Name of the parameter.
        shape: Shape of the segment (elements).
        dim: Dimension along which the segment is cut; None for the full gradient.
        local_start: First index of the segment along ``dim`` in this rank's gradient; None if this
            rank does not have the segment.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    local_start: int | None = 0

    def of(self, gradient: Tensor) -> Tensor | None:
        """Return the view of this segment in a gradient; None if this rank does not have it."""
        if self.local_start is None:
            return None
        return (
            gradient
            if self.dim is None
            else gradient.narrow(self.dim, self.local_start, self.shape[self.dim])
        )


class PartialSums:
    """Sums of partial gradients over the tensor axis, in one message for each dtype.

    Args:
        specs: Shard specs of this rank's partial parameters, by name.
        mesh: Process groups of this rank.

    Communication: one gather of ranges over tp, if there are partial parameters.
    """

    def __init__(self, specs: dict[str, ShardSpec], mesh: ParallelMesh) -> None:
        self._specs = specs
        self._mesh = mesh
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        if mesh.tp.size > 1 and specs:
            ranges = {
                name: [(piece.start, piece.stop) for piece in spec.ranges]
                for name, spec in specs.items()
            }
            ranges_by_rank = all_gather_objects(ranges, mesh.tp)
            self._pieces = {
                name: overlapping_pieces([rank_ranges[name] for rank_ranges in ranges_by_rank])
                for name in ranges
            }

    def add(self, names: Collection[str], gradient_of: GradientOf) -> None:
        """Sum the named gradients over the tensor axis, in place.

        Communication: one all-reduce over tp for each dtype.
        """
        segments = [
            segment
            for name in self._specs
            if name in names
            for segment in self._segments(name, gradient_of(name))
        ]
        by_dtype: dict[torch.dtype, list[_Segment]] = {}
        for segment in segments:
            by_dtype.setdefault(gradient_of(segment.name).dtype, []).append(segment)
        for dtype_segments in by_dtype.values():
            self._reduce(dtype_segments, gradient_of)

    def _segments(self, name: str, gradient: Tensor) -> Iterable[_Segment]:
        spec = self._specs[name]
        shape = tuple(gradient.shape)
        for start, stop in self._pieces.get(name, ()):
            local_start = None
            before = 0
            for held in spec.ranges:
                if held.start <= start and stop <= held.stop:
                    local_start = before + start - held.start
                before += held.size
            if shape:
                yield _Segment(
                    name,
                    (*shape[: spec.dim], stop - start, *shape[spec.dim + 1 :]),
                    spec.dim,
                    local_start,
                )
            else:
                yield _Segment(name, ())

    def _reduce(self, segments: Sequence[_Segment], gradient_of: GradientOf) -> None:
        local = [segment.of(gradient_of(segment.name)) for segment in segments]
        sizes = [prod(segment.shape) for segment in segments]
        flat = gradient_of(segments[0].name).new_zeros(sum(sizes))
        pairs = [
            (slot.view(segment.shape), view)
            for slot, segment, view in zip(flat.split(sizes), segments, local, strict=True)
            if view is not None
        ]
        inside = [slot for slot, _ in pairs]
        outside = [view for _, view in pairs]
        if pairs:
            torch._foreach_copy_(inside, outside)
        all_reduce_(flat, self._mesh.tp)
        if pairs:
            torch._foreach_copy_(outside, inside)


def sum_slices_(slices: Sequence[Shaped[Tensor, "..."]], axis: MeshAxis) -> None:
    """Sum tensors over an axis, in place.

    Communication: one all-reduce over the axis for each dtype.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in slices:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = all_reduce_(torch.cat([tensor.reshape(-1) for tensor in tensors]), axis)
        sums = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [total.view(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]
        )
