"""Placement of a local tensor in its full tensor, attached to every parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_megatron.plan.shards import FlatBox, ShardRange, flat_range_boxes

_ATTRIBUTE = "shard_spec"


@dataclass(frozen=True)
class Box:
    """Contiguous piece of a local tensor, with its position in the full tensor.

    Args:
        offsets: First index of the piece in each dimension of the full tensor (elements).
        sizes: Extent of the piece in each dimension (elements).
        local_start: First index of the piece along the sharded dimension of the local tensor; for a
            flat slice, the index of the piece's first element in the slice (elements).
        copy: Index of this rank's copy of the piece. Norms count copy 0, and checkpoints save it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_start: int
    copy: int


@dataclass(frozen=True)
class ShardSpec:
    """Placement of a local tensor in its full tensor.

    The local tensor is the concatenation of ``ranges`` of the full tensor along ``dim``, followed
    by padding rows that are not part of the full tensor (padded vocabulary). Copies on
    data-parallel and context-parallel ranks, for experts on expert-data-parallel ranks, are not
    described, because every such rank has one.

    Args:
        ranges: Ranges of this rank along ``dim``, in local order.
        partial: Whether each tensor-parallel copy of a range computes only a part of its gradient.
            The parts must then be summed over the tensor axis. Examples are norms and biases under
            sequence parallelism, and replicated key/value heads.
        tied_to: Name of the first-stage parameter of the same model that this last-stage parameter
            copies.
        is_expert: Whether the tensor belongs to experts, which are distributed over the expert
            grid. The gradient on a rank includes the tokens of all ranks that send tokens to it.
        over_ep: Whether ranges are shares of the ranks of ep, as in a stack of experts; otherwise
            of those of tp, or for experts of etp.
    """

    full_shape: tuple[int, ...]
    ranges: tuple[ShardRange, ...]
    dim: int = 0
    partial: bool = False
    tied_to: str | None = None
    is_expert: bool = False
    over_ep: bool = False

    @property
    def local_extent(self) -> int:
        """Return the number of local rows along ``dim`` without padding (elements)."""
        return sum(piece.size for piece in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has the full tensor."""
        return len(self.ranges) == 1 and self.local_extent == (
            self.full_shape[self.dim] if self.full_shape else 1
        )

    def tied(self, name: str) -> ShardSpec:
        """Return this placement for the copy of the parameter ``name`` on the last stage."""
        return replace(self, tied_to=name)

    def boxes(self) -> list[Box]:
        """List this rank's pieces of the full tensor, without empty ones."""
        if not self.full_shape:
            return [Box((), (), 0, self.ranges[0].copy)]
        boxes = []
        local_start = 0
        for piece in self.ranges:
            if piece.size:
                offsets = tuple(
                    piece.start if d == self.dim else 0 for d in range(len(self.full_shape))
                )
                sizes = tuple(
                    piece.size if d == self.dim else n for d, n in enumerate(self.full_shape)
                )
                boxes.append(Box(offsets, sizes, local_start, piece.copy))
            local_start += piece.size
        return boxes

    def local_views(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Return every box with its view of ``local``.

        Shapes: local ``full_shape`` with ``local_extent`` (plus padding) along ``dim``.
        """
        if not self.full_shape:
            return [(self.boxes()[0], local)]
        return [
            (box, local.narrow(self.dim, box.local_start, box.sizes[self.dim]))
            for box in self.boxes()
        ]

    def shard(self, full: Tensor, local_size: int | None = None) -> Tensor:
        """Return this rank's part of the full tensor; padding, up to ``local_size``, is zero."""
        if tuple(full.shape) != self.full_shape:
            raise ValueError(
                f"the full tensor must have shape {self.full_shape}: it has {tuple(full.shape)}."
            )
        if not self.full_shape:
            return full.clone()
        shape = list(self.full_shape)
        shape[self.dim] = self.local_extent if local_size is None else local_size
        local = full.new_zeros(shape)
        copy_from_full(self, local, full)
        return local


@dataclass(frozen=True)
class FlatSlice:
    """Placement of a range of a flattened local tensor in its full tensor.

    The part of the optimizer on a data-parallel rank consists of such ranges. A range may start and
    end at any element, and may include padding rows, which belong to no box. The interface is that
    of :class:`ShardSpec`.
    """

    spec: ShardSpec
    local_shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self.spec.full_shape

    @property
    def tied_to(self) -> str | None:
        """Return the name of the first-stage parameter that this parameter copies."""
        return self.spec.tied_to

    @property
    def partial(self) -> bool:
        """Return whether each tensor-parallel copy computes only a part of the gradient."""
        return self.spec.partial

    @property
    def is_expert(self) -> bool:
        """Return whether the tensor belongs to experts."""
        return self.spec.is_expert

    @property
    def size(self) -> int:
        """Return the number of elements of the range, padding included."""
        return self.stop - self.start

    def boxes(self) -> list[Box]:
        """List the range's pieces of the full tensor in flat order, without padding."""
        return [box for box, _, _ in self._pieces()]

    def local_views(self, flat: Tensor) -> list[tuple[Box, Tensor]]:
        """Return every box with its view of ``flat``.

        Shapes: flat (stop - start), contiguous; a view has the sizes of its box.
        """
        views = []
        for box, outer, first in self._pieces():
            rows = flat.narrow(0, outer.start - self.start, outer.stop - outer.start).view(
                outer.sizes
            )
            if box.sizes:
                rows = rows.narrow(self.spec.dim, first, box.sizes[self.spec.dim])
            views.append((box, rows))
        return views

    def _pieces(self) -> list[tuple[Box, FlatBox, int]]:
        # Tuples of a box of the full tensor, the box of the local tensor that contains it, and its
        # first index along `dim` within that local box.
        pieces: list[tuple[Box, FlatBox, int]] = []
        dim = self.spec.dim
        # Distance between neighbours along `dim` in the flattened tensor.
        stride = prod(self.local_shape[dim + 1 :])
        for outer in flat_range_boxes(self.local_shape, self.start, self.stop):
            if not outer.sizes:
                pieces.append((Box((), (), 0, self.spec.ranges[0].copy), outer, 0))
                continue
            # Rows [low, high) of the local tensor; `before` counts the rows of the ranges already
            # visited.
            low = outer.offsets[dim]
            high = low + outer.sizes[dim]
            before = 0
            for held in self.spec.ranges:
                first = max(low, before)
                last = min(high, before + held.size)
                if first < last:
                    offsets = _replaced(outer.offsets, dim, held.start + first - before)
                    sizes = _replaced(outer.sizes, dim, last - first)
                    local_start = outer.start - self.start + (first - low) * stride
                    pieces.append((Box(offsets, sizes, local_start, held.copy), outer, first - low))
                before += held.size
        return pieces


Placement: TypeAlias = ShardSpec | FlatSlice
"""Placement of a tensor in its full tensor: a shard along one dimension, or a flat range of one."""


def replicated_spec(tensor: Tensor, copy: int = 0, *, partial: bool = False) -> ShardSpec:
    """Return the spec of a tensor that every tensor-parallel rank has in full, as copy ``copy``."""
    shape = tuple(tensor.shape)
    return ShardSpec(shape, (ShardRange(0, shape[0] if shape else 1, copy),), partial=partial)


def copy_from_full(placement: Placement, local: Tensor, full: Tensor) -> None:
    """Copy the pieces of ``full`` that belong to ``local``; its padding remains unchanged."""
    with torch.no_grad():
        for box, view in placement.local_views(local):
            part = full
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            view.copy_(part)


def set_shard_spec(parameter: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
    """Attach ``spec`` to a parameter and return the parameter."""
    setattr(parameter, _ATTRIBUTE, spec)
    return parameter


def shard_spec_of(parameter: Tensor, tp_rank: int = 0) -> ShardSpec:
    """Return the spec of a parameter.

    A parameter without a spec is not sharded, and this rank has copy ``tp_rank`` of it.
    """
    spec = getattr(parameter, _ATTRIBUTE, None)
    return spec if isinstance(spec, ShardSpec) else replicated_spec(parameter, tp_rank)


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def num_elements(module: nn.Module) -> int:
    """Count a module's parameters on this rank, without the padding of vocabularies (elements)."""
    return sum(prod(box.sizes) for p in module.parameters() for box in shard_spec_of(p).boxes())
