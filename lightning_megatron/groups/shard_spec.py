"""Which part of a full tensor a rank holds: data on every parameter, read by whoever must know how it is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_megatron.plan.boxes import FlatBox, flat_range_boxes
from lightning_megatron.plan.shards import ShardRange

_ATTRIBUTE = "shard_spec"


@dataclass(frozen=True)
class Box:
    """Place one contiguous piece of a local tensor inside the full tensor.

    Args:
        offsets: First index of the piece in each dimension of the full tensor (elements).
        sizes: Extent of the piece in each dimension (elements).
        local_start: First index of the piece along the cut dimension of the local tensor; for a flat slice, the
            piece's first element in the slice (elements).
        copy: Which copy of the piece this rank holds; 0 is the one that is counted in norms and written to checkpoints.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_start: int
    copy: int


@dataclass(frozen=True)
class ShardSpec:
    """Describe how a local tensor lies in its full tensor.

    The local tensor is the concatenation, along ``dim``, of ``ranges`` of the full tensor, then padding rows that
    belong to no full tensor (the padded vocabulary). Data-parallel and context-parallel ranks always hold copies and
    are not listed; of an expert's tensor, the expert-data-parallel ranks.

    Args:
        full_shape: Shape of the full tensor, without padding (elements).
        ranges: What this rank holds along ``dim``, in local order.
        dim: The dimension that is cut.
        partial: Whether the tensor-parallel copies of a range each see only a part of its gradient, so that the parts
            must be added over the tensor axis (norms and biases under sequence parallelism, replicated key/value
            heads).
        tied_to: Name, within the same model, of the first-stage parameter that this last-stage parameter is a copy of.
        is_expert: Whether the tensor belongs to experts, which are spread over the expert grid: its gradient on a rank
            is that of the tokens of all ranks that send theirs there.
    """

    full_shape: tuple[int, ...]
    ranges: tuple[ShardRange, ...]
    dim: int = 0
    partial: bool = False
    tied_to: str | None = None
    is_expert: bool = False

    @property
    def local_extent(self) -> int:
        """Count the rows along ``dim`` that are part of the full tensor (elements)."""
        return sum(piece.size for piece in self.ranges)

    @property
    def is_whole(self) -> bool:
        """Tell whether this rank holds the full tensor."""
        return len(self.ranges) == 1 and self.local_extent == (self.full_shape[self.dim] if self.full_shape else 1)

    def tied(self, name: str) -> ShardSpec:
        """Return the same placement for the last-stage copy of the parameter ``name``."""
        return replace(self, tied_to=name)

    def boxes(self) -> list[Box]:
        """List the pieces of the full tensor that this rank holds; empty pieces are left out."""
        if not self.full_shape:
            return [Box((), (), 0, self.ranges[0].copy)]
        boxes, local_start = [], 0
        for piece in self.ranges:
            if piece.size:
                offsets = tuple(piece.start if d == self.dim else 0 for d in range(len(self.full_shape)))
                sizes = tuple(piece.size if d == self.dim else n for d, n in enumerate(self.full_shape))
                boxes.append(Box(offsets, sizes, local_start, piece.copy))
            local_start += piece.size
        return boxes

    def local_views(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Pair every box with the view of ``local`` that holds it.

        Shapes: local ``full_shape`` with ``local_extent`` (plus padding) along ``dim``.
        """
        if not self.full_shape:
            return [(self.boxes()[0], local)]
        return [(box, local.narrow(self.dim, box.local_start, box.sizes[self.dim])) for box in self.boxes()]

    def shard(self, full: Tensor, local_size: int | None = None) -> Tensor:
        """Cut this rank's tensor out of the full one; padding rows are zero.

        Args:
            full: The full tensor, of ``full_shape``.
            local_size: Extent of the result along ``dim`` with padding; None means no padding (elements).

        Raises:
            ValueError: If ``full`` has another shape.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"the full tensor must have shape {self.full_shape}: {tuple(full.shape)}.")
        if not self.full_shape:
            return full.clone()
        shape = list(self.full_shape)
        shape[self.dim] = self.local_extent if local_size is None else local_size
        local = full.new_zeros(shape)
        self.copy_from_full(local, full)
        return local

    def copy_from_full(self, local: Tensor, full: Tensor) -> None:
        """Write this rank's pieces of ``full`` into ``local`` in place; padding rows keep their value."""
        with torch.no_grad():
            for box, view in self.local_views(local):
                view.copy_(
                    full.narrow(self.dim, box.offsets[self.dim], box.sizes[self.dim]) if self.full_shape else full
                )

    def copy_to_full(self, local: Tensor, full: Tensor, *, counted_only: bool = False) -> None:
        """Write this rank's pieces into ``full`` in place; with ``counted_only`` the pieces of copy 0 alone."""
        with torch.no_grad():
            for box, view in self.local_views(local):
                if box.copy and counted_only:
                    continue
                (full.narrow(self.dim, box.offsets[self.dim], box.sizes[self.dim]) if self.full_shape else full).copy_(
                    view
                )


@dataclass(frozen=True)
class FlatSlice:
    """Describe how a range of a flattened local tensor lies in its full tensor.

    A data rank's share of the optimizer is such ranges: they begin and end anywhere, also in padding rows, which are
    part of no box. It answers the same questions as a :class:`ShardSpec`.

    Args:
        spec: How the local tensor lies in the full one.
        local_shape: Shape of the local tensor, padding rows included (elements).
        start: First element of the range in the flattened local tensor.
        stop: One past its last element.

    Raises:
        ValueError: If the local tensor cannot be that of ``spec``, or the range leaves it.
    """

    spec: ShardSpec
    local_shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        full, dim = self.spec.full_shape, self.spec.dim
        fits = len(self.local_shape) == len(full) and all(
            size >= self.spec.local_extent if d == dim else size == full[d] for d, size in enumerate(self.local_shape)
        )
        if not fits:
            raise ValueError(
                f"a local tensor has at least the {self.spec.local_extent} rows of its spec along dimension {dim}, and "
                f"the extents of the full shape {full} along the others: {self.local_shape}."
            )
        size = prod(self.local_shape)
        if not 0 <= self.start <= self.stop <= size:
            raise ValueError(
                f"a flat slice must lie in its tensor of {size} elements: [{self.start}, {self.stop}). "
                f"Use 0 <= start <= stop <= {size}."
            )

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self.spec.full_shape

    @property
    def tied_to(self) -> str | None:
        """Return the name of the first-stage parameter that this one is a copy of."""
        return self.spec.tied_to

    @property
    def partial(self) -> bool:
        """Tell whether the tensor-parallel copies each see a part of the gradient."""
        return self.spec.partial

    @property
    def is_expert(self) -> bool:
        """Tell whether the tensor belongs to experts."""
        return self.spec.is_expert

    @property
    def size(self) -> int:
        """Count the elements of the range, padding included."""
        return self.stop - self.start

    def boxes(self) -> list[Box]:
        """List the pieces of the full tensor that this range holds, in flat order; padding is left out."""
        return [box for box, _, _ in self._pieces()]

    def local_views(self, flat: Tensor) -> list[tuple[Box, Tensor]]:
        """Pair every box with the view of ``flat`` that holds it.

        Shapes: flat (stop - start), contiguous; a view has the sizes of its box.

        Raises:
            ValueError: If ``flat`` has another shape.
        """
        if tuple(flat.shape) != (self.size,):
            raise ValueError(f"a flat slice must be one dimension of {self.size} elements: {tuple(flat.shape)}.")
        views = []
        for box, outer, first in self._pieces():
            rows = flat.narrow(0, outer.start - self.start, outer.stop - outer.start).view(outer.sizes)
            if box.sizes:
                rows = rows.narrow(self.spec.dim, first, box.sizes[self.spec.dim])
            views.append((box, rows))
        return views

    def copy_from_full(self, flat: Tensor, full: Tensor) -> None:
        """Write this range's pieces of ``full`` into ``flat`` in place; padding keeps its value."""
        with torch.no_grad():
            for box, view in self.local_views(flat):
                view.copy_(_region(full, box))

    def copy_to_full(self, flat: Tensor, full: Tensor, *, counted_only: bool = False) -> None:
        """Write this range's pieces into ``full`` in place; with ``counted_only`` the pieces of copy 0 alone."""
        with torch.no_grad():
            for box, view in self.local_views(flat):
                if not (box.copy and counted_only):
                    _region(full, box).copy_(view)

    def _pieces(self) -> list[tuple[Box, FlatBox, int]]:
        # Each box with the box of the local tensor that it is cut from, and where in that it starts along `dim`.
        found: list[tuple[Box, FlatBox, int]] = []
        dim = self.spec.dim
        # Elements between neighbours along `dim`.
        stride = prod(self.local_shape[dim + 1 :])
        for outer in flat_range_boxes(self.local_shape, self.start, self.stop):
            if not outer.sizes:
                found.append((Box((), (), 0, self.spec.ranges[0].copy), outer, 0))
                continue
            low, high, before = outer.offsets[dim], outer.offsets[dim] + outer.sizes[dim], 0
            for held in self.spec.ranges:
                first, last = max(low, before), min(high, before + held.size)
                if first < last:
                    offsets = _replaced(outer.offsets, dim, held.start + first - before)
                    sizes = _replaced(outer.sizes, dim, last - first)
                    local_start = outer.start - self.start + (first - low) * stride
                    found.append((Box(offsets, sizes, local_start, held.copy), outer, first - low))
                before += held.size
        return found


Placement: TypeAlias = ShardSpec | FlatSlice
"""How a tensor lies in its full tensor: a cut along one dimension, or a flat range of such a cut."""


def whole_spec(tensor: Tensor, copy: int = 0, *, partial: bool = False) -> ShardSpec:
    """Describe a tensor that every tensor-parallel rank holds whole; ``copy`` is this rank's index among them."""
    shape = tuple(tensor.shape)
    return ShardSpec(shape, (ShardRange(0, shape[0] if shape else 1, copy),), partial=partial)


def set_shard_spec(parameter: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
    """Attach ``spec`` to a parameter and return the parameter."""
    setattr(parameter, _ATTRIBUTE, spec)
    return parameter


def shard_spec_of(parameter: Tensor, tp_rank: int = 0) -> ShardSpec:
    """Return the spec of a parameter; one without a spec is held whole by every rank, as copy ``tp_rank``."""
    spec = getattr(parameter, _ATTRIBUTE, None)
    return spec if isinstance(spec, ShardSpec) else whole_spec(parameter, tp_rank)


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _region(full: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full
