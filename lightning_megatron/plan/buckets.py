"""Layout of parameters in flat gradient buffers, and the slices that each data rank owns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

BUCKET_SIZE = 40_000_000
"""Elements at which a bucket closes: enough for full bandwidth, few enough for an early start."""

ALIGNMENT = 64
"""Every parameter starts at a multiple of this number of elements: 128 bytes of a half type."""

#: Bucket sizes are multiples of it, so that the next bucket and the equal parts are aligned
#: (elements).
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True)
class FlatParameter:
    """Flattened parameter that is to be placed in a buffer.

    Args:
        name: Name of the parameter, unique in the buffer.
        group: Group of the parameter; all pieces of a bucket have the same group.
        own_bucket: Whether the piece needs its own bucket. Tied weights do, because their gradients
            are first summed over another process group.
        stack: Key that pieces share if one matrix product reads them together. They stay
            neighbours, and no bucket ends between them. None for an independent piece.
    """

    name: str
    size: int
    group: int = 0
    own_bucket: bool = False
    stack: int | None = None


@dataclass(frozen=True)
class ParameterRange:
    """Flattened parameter at [start, stop) of the buffer (elements)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters whose gradients are communicated together."""

    start: int
    stop: int
    placed: tuple[ParameterRange, ...]
    group: int = 0

    @property
    def size(self) -> int:
        """Return the number of elements, padding included (elements)."""
        return self.stop - self.start

    def part(self, index: int, num_parts: int) -> tuple[int, int]:
        """Return [start, stop) in the buffer of one of ``num_parts`` equal parts."""
        extent = self.size // num_parts
        return self.start + index * extent, self.start + (index + 1) * extent


@dataclass(frozen=True)
class Slice:
    """Range of a flattened parameter that one part owns.

    Args:
        start: First element of the range in the flattened parameter.
        stop: Index after its last element.
        buffer_start: First element of the range in the buffer.
        shard_start: First element of the range in the compact shard, which is the concatenation of
            the part's share of every bucket.
        bucket: Index of the bucket.
    """

    name: str
    start: int
    stop: int
    buffer_start: int
    shard_start: int
    bucket: int

    @property
    def size(self) -> int:
        """Return the number of elements (elements)."""
        return self.stop - self.start


@dataclass(frozen=True)
class BufferPlan:
    """Placement of parameters in a buffer; each rank owns an equal part of every bucket.

    Args:
        buckets: Consecutive buckets; the first starts at element 0.
    """

    num_parts: int
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Return the number of elements of the buffer, padding included (elements)."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def shard_size(self) -> int:
        """Return the size of one part's compact shard, padding included (elements)."""
        return self.size // self.num_parts

    def shard_start(self, bucket: int) -> int:
        """Return the start of a bucket's share in the compact shard of every part (elements)."""
        return self.buckets[bucket].start // self.num_parts

    def slices(self, part: int) -> tuple[Slice, ...]:
        """List the ranges of parameters that one part owns, in buffer order, without empty ones."""
        slices: list[Slice] = []
        for index, bucket in enumerate(self.buckets):
            low, high = bucket.part(part, self.num_parts)
            # The placements are sorted: only those that overlap [low, high) are visited.
            first = bisect_right(bucket.placed, low, key=lambda placed: placed.stop)
            last = bisect_left(bucket.placed, high, key=lambda placed: placed.start)
            for placed in bucket.placed[first:last]:
                start = max(placed.start, low)
                stop = min(placed.stop, high)
                if start < stop:
                    shard_start = self.shard_start(index) + start - low
                    slices.append(
                        Slice(
                            placed.name,
                            start - placed.start,
                            stop - placed.start,
                            start,
                            shard_start,
                            index,
                        )
                    )
        return tuple(slices)

    def place(self, name: str) -> ParameterRange:
        """Return the placement of a parameter.

        Raises:
            KeyError: If the buffer has no such parameter.
        """
        bucket, index = self._places[name]
        return self.buckets[bucket].placed[index]

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return {
            placed.name: (bucket_index, index)
            for bucket_index, bucket in enumerate(self.buckets)
            for index, placed in enumerate(bucket.placed)
        }


def plan_by_elements(
    pieces: Sequence[FlatParameter],
    num_parts: int,
    bucket_size: int = BUCKET_SIZE,
) -> BufferPlan:
    """Place parameters in reverse order of use, in buckets that ranks share by elements.

    Backward produces the gradients of the last parameters first, so those come first in the buffer.
    A bucket closes when it has at least ``bucket_size`` elements, and at every change of group. The
    layout equals that of Megatron-Core's distributed optimizer, except that a first parameter of at
    least ``bucket_size`` elements has its own bucket. This is the token embedding: its gradient
    comes last, may be exchanged by rows, and no other gradient should wait for it.

    Args:
        num_parts: Number of ranks that share the buffer; the size of a bucket is a multiple of it
            and of 128.
        bucket_size: Size at which a bucket closes (elements).

    Source: Megatron-Core's ``core/optimizer/param_layout.py``.
    """
    multiple = lcm(num_parts, _BUCKET_MULTIPLE)
    buckets: list[Bucket] = []
    pending: list[FlatParameter] = []

    def close() -> None:
        if pending:
            buckets.append(_bucket(pending, buckets[-1].stop if buckets else 0, multiple))
            pending.clear()

    firsts = {piece.group: piece for piece in reversed(pieces)}
    filled = 0
    for piece in reversed(pieces):
        is_inside_stack = (
            bool(pending) and piece.stack is not None and piece.stack == pending[-1].stack
        )
        is_full = filled >= bucket_size and not is_inside_stack
        is_table = piece is firsts[piece.group] and piece.size >= bucket_size
        is_alone = piece.own_bucket or (is_table and not is_inside_stack)
        if pending and (
            is_full or is_alone or pending[-1].own_bucket or piece.group != pending[0].group
        ):
            close()
        filled = _align(filled, ALIGNMENT) + piece.size if pending else piece.size
        pending.append(piece)
    close()
    return BufferPlan(num_parts, tuple(buckets))


def plan_by_parameters(pieces: Sequence[FlatParameter], num_parts: int) -> BufferPlan:
    """Assign whole parameters to the parts, for optimizers that need whole parameters.

    There is one bucket for each group. The parameters are assigned in order of decreasing size,
    each to the part with the fewest elements, so that the parts differ by at most the largest
    parameter. All parts are padded to the size of the largest part. Within a part, parameters are
    in reverse order of use.
    """
    groups = dict.fromkeys(piece.group for piece in reversed(pieces))
    buckets: list[Bucket] = []
    for group in groups:
        members = [piece for piece in reversed(pieces) if piece.group == group]
        start = buckets[-1].stop if buckets else 0
        parts = [_placed(part) for part in _distribute(members, num_parts)]
        extent = max(_align(part[-1].stop if part else 0, _BUCKET_MULTIPLE) for part in parts)
        placed = tuple(
            ParameterRange(
                item.name, start + index * extent + item.start, start + index * extent + item.stop
            )
            for index, part in enumerate(parts)
            for item in part
        )
        buckets.append(Bucket(start, start + num_parts * extent, placed, group))
    return BufferPlan(num_parts, tuple(buckets))


def _distribute(pieces: Sequence[FlatParameter], num_parts: int) -> list[list[FlatParameter]]:
    # Loads count aligned sizes, because the padding between parameters takes memory, too.
    loads = [0] * num_parts
    owners: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        lightest = min(range(num_parts), key=loads.__getitem__)
        loads[lightest] += _align(piece.size, ALIGNMENT)
        owners[piece.name] = lightest
    parts: list[list[FlatParameter]] = [[] for _ in range(num_parts)]
    for piece in pieces:
        parts[owners[piece.name]].append(piece)
    return parts


def _placed(pieces: Sequence[FlatParameter], start: int = 0) -> list[ParameterRange]:
    placed: list[ParameterRange] = []
    for piece in pieces:
        first = _align(placed[-1].stop if placed else start, ALIGNMENT)
        placed.append(ParameterRange(piece.name, first, first + piece.size))
    return placed


def _bucket(pieces: Sequence[FlatParameter], start: int, multiple: int) -> Bucket:
    placed = _placed(pieces, start)
    return Bucket(start, _align(placed[-1].stop, multiple), tuple(placed), pieces[0].group)


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
