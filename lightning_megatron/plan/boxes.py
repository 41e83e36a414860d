"""Boxes that cover a range of a flattened tensor; they name optimizer slices in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lightning_megatron.errors import ParallelPlanError


@dataclass(frozen=True)
class FlatBox:
    """Box of a tensor whose elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Return the index after the last element in the flattened tensor."""
        return self.start + prod(self.sizes)


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[FlatBox]:
    """Split the range [start, stop) of a flattened tensor into the fewest boxes that cover it.

    A range consists of the end of a row, whole rows and the start of a row. The same holds within
    each row, so that there are at most 2 x dimensions - 1 boxes.

    Args:
        shape: Shape of the tensor, row-major; () for a scalar.
        start: First element of the range.
        stop: Index after its last element; equal to ``start`` for an empty range.

    Returns:
        The boxes in flat order; an empty list for an empty range.

    Raises:
        ParallelPlanError: If the range is not within the tensor.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ParallelPlanError(
            f"a range must lie in its tensor: [{start}, {stop}) of a tensor of shape {shape}, "
            f"which has {prod(shape)} elements. Use 0 <= start <= stop <= {prod(shape)}."
        )
    return [
        FlatBox(offsets, sizes, first) for offsets, sizes, first in _boxes(shape, start, stop, 0)
    ]


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, base: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    # `base` is the index of this sub-tensor's first element in the flattened full tensor.
    if start == stop:
        return []
    if not shape:
        return [((), (), base)]
    row = prod(shape[1:])
    # Whole rows are those from `first` up to, but not including, `last`.
    first = -(-start // row)
    last = stop // row
    if first > last:  # the range lies inside one row
        return _within(shape, last, start - last * row, stop - last * row, base)
    boxes = []
    if start < first * row:
        boxes = _within(shape, first - 1, start - (first - 1) * row, row, base)
    if first < last:
        boxes.append(
            ((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), base + first * row)
        )
    return boxes + _within(shape, last, 0, stop - last * row, base)


def _within(
    shape: tuple[int, ...], index: int, start: int, stop: int, base: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    inner = _boxes(shape[1:], start, stop, base + index * prod(shape[1:]))
    return [((index, *offsets), (1, *sizes), first) for offsets, sizes, first in inner]
