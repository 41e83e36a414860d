"""A range of a flattened tensor as boxes of the tensor: how slices of an optimizer are named in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lightning_megatron.errors import ParallelPlanError


@dataclass(frozen=True)
class FlatBox:
    """Place a box of a tensor whose elements are contiguous in the flattened tensor.

    Args:
        offsets: first index of the box in each dimension.
        sizes: extent of the box in each dimension.
        start: its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Return one past the last element in the flattened tensor."""
        return self.start + prod(self.sizes)


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[FlatBox]:
    """Cut [start, stop) of a flattened tensor into as few boxes as hold exactly these elements.

    A range is the end of a row, whole rows and the start of a row, and so again within the rows: at most
    2 x dimensions - 1 boxes.

    Args:
        shape: of the tensor, row-major; () for a scalar.
        start: first element of the range.
        stop: one past its last element; equal to start for an empty range.

    Returns:
        the boxes in flat order; none for an empty range.

    Raises:
        ParallelPlanError: if the range leaves the tensor.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ParallelPlanError(
            f"a range must lie in its tensor: [{start}, {stop}) of a tensor of shape {shape}, which has {prod(shape)} "
            f"elements. Use 0 <= start <= stop <= {prod(shape)}."
        )
    return [FlatBox(offsets, sizes, first) for offsets, sizes, first in _boxes(shape, start, stop, 0)]


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, base: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    # `base` is where this sub-tensor starts in the flattened whole.
    if start == stop:
        return []
    if not shape:
        return [((), (), base)]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        return _within(shape, last, start - last * row, stop - last * row, base)
    found = _within(shape, first - 1, start - (first - 1) * row, row, base) if start < first * row else []
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), base + first * row))
    return found + _within(shape, last, 0, stop - last * row, base)


def _within(
    shape: tuple[int, ...], index: int, start: int, stop: int, base: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    inner = _boxes(shape[1:], start, stop, base + index * prod(shape[1:]))
    return [((index, *offsets), (1, *sizes), first) for offsets, sizes, first in inner]
