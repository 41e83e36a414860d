"""Where parameters lie in the flat buffers of gradients, and which slice of them each data rank optimises."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.legal_values import require_index, require_positive

BUCKET_SIZE = 40_000_000
"""Elements at which a bucket closes: large enough to use the whole bandwidth, small enough to start early."""

ALIGNMENT = 64
"""Every parameter starts at a multiple of so many elements: 128 bytes of a half type."""

_BUCKET_MULTIPLE = 128  # a bucket's extent is a multiple of it, so that the next bucket and equal parts are aligned


@dataclass(frozen=True)
class Piece:
    """Name a flattened parameter that wants a place in a buffer.

    Args:
        name: the parameter's name, unique in the buffer.
        size: its extent (elements).
        group: a bucket holds pieces of one group only.
        alone: whether it has a bucket of its own (tied weights, whose gradients meet on another group first).
        stack: what pieces share that one matrix product reads and that must be neighbours, so that no bucket ends
            between them; None for a piece by itself.
    """

    name: str
    size: int
    group: int = 0
    alone: bool = False
    stack: int | None = None


@dataclass(frozen=True)
class Placed:
    """Say that a flattened parameter lies at [start, stop) of the buffer (elements)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Hold neighbouring parameters whose gradients travel together.

    Args:
        start: first element in the buffer.
        stop: one past the last element, padding included.
        placed: the parameters, in buffer order.
        group: the group of all of them.
    """

    start: int
    stop: int
    placed: tuple[Placed, ...]
    group: int = 0

    @property
    def size(self) -> int:
        """Return the extent, padding included (elements)."""
        return self.stop - self.start

    def part(self, index: int, num_parts: int) -> tuple[int, int]:
        """Return [start, stop) in the buffer of one of `num_parts` equal parts.

        Raises:
            ParallelPlanError: if there is no such part, or the bucket cannot be cut equally.
        """
        require_index("part", index, "num_parts", num_parts)
        if self.size % num_parts:
            raise ParallelPlanError(
                f"a bucket must be cut into equal parts: its size is {self.size}, num_parts is {num_parts}. "
                f"It was planned for another number of parts. Plan the buffer again with num_parts of {num_parts}."
            )
        extent = self.size // num_parts
        return self.start + index * extent, self.start + (index + 1) * extent


@dataclass(frozen=True)
class Slice:
    """Name a range of a flattened parameter that one part holds.

    Args:
        name: the parameter.
        start: first element of the range in the flattened parameter.
        stop: one past its last element.
        buffer_start: where the range starts in the buffer.
        shard_start: where it starts in the compact shard: the part's share of every bucket, one after the other.
        bucket: index of the bucket.
    """

    name: str
    start: int
    stop: int
    buffer_start: int
    shard_start: int
    bucket: int

    @property
    def size(self) -> int:
        """Return the extent (elements)."""
        return self.stop - self.start


@dataclass(frozen=True)
class BufferPlan:
    """Place parameters in a buffer that `num_parts` ranks share, each an equal part of every bucket.

    Args:
        num_parts: ranks that share the buffer.
        buckets: neighbours, the first at element 0.
    """

    num_parts: int
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Return the extent of the buffer, padding included (elements)."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def shard_size(self) -> int:
        """Return the extent of one part's compact shard, padding included (elements)."""
        return self.size // self.num_parts

    def shard_start(self, bucket: int) -> int:
        """Return where a bucket's share starts in every part's compact shard (elements)."""
        return self.buckets[bucket].start // self.num_parts

    def slices(self, part: int) -> tuple[Slice, ...]:
        """List the ranges of parameters that one part holds, in buffer order; empty ones are left out.

        Raises:
            ParallelPlanError: if there is no such part.
        """
        require_index("part", part, "num_parts", self.num_parts)
        found: list[Slice] = []
        for index, bucket in enumerate(self.buckets):
            low, high = bucket.part(part, self.num_parts)
            first = bisect_right(bucket.placed, low, key=lambda placed: placed.stop)
            last = bisect_left(bucket.placed, high, key=lambda placed: placed.start)
            for placed in bucket.placed[first:last]:
                start, stop = max(placed.start, low), min(placed.stop, high)
                if start < stop:
                    shard_start = self.shard_start(index) + start - low
                    found.append(
                        Slice(placed.name, start - placed.start, stop - placed.start, start, shard_start, index)
                    )
        return tuple(found)

    def place(self, name: str) -> Placed:
        """Return where a parameter lies.

        Raises:
            KeyError: if the buffer has no such parameter.
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
    pieces: Iterable[Piece], num_parts: int, bucket_size: int = BUCKET_SIZE, alignment: int = ALIGNMENT
) -> BufferPlan:
    """Lay parameters out in reverse order of use, in buckets that are cut without regard to parameters.

    The gradients that are ready first come first. A bucket closes once it holds `bucket_size` elements or more, and
    where the group changes. Equal to Megatron-Core's layout of the distributed optimizer.

    Args:
        pieces: the parameters in order of use.
        num_parts: ranks that share the buffer; a bucket's extent is a multiple of it, and of 128.
        bucket_size: where a bucket closes (elements).
        alignment: every parameter starts at a multiple of it (elements).

    Raises:
        ParallelPlanError: for sizes below 1, negative pieces and doubled names.

    Source: Megatron-Core's `core/optimizer/param_layout.py`.
    """
    pieces = _checked(pieces, num_parts, bucket_size=bucket_size, alignment=alignment)
    multiple = lcm(num_parts, _BUCKET_MULTIPLE, alignment)
    buckets: list[Bucket] = []
    pending: list[Piece] = []

    def close() -> None:
        if pending:
            buckets.append(_bucket(pending, buckets[-1].stop if buckets else 0, alignment, multiple))
            pending.clear()

    filled = 0
    for piece in reversed(pieces):
        is_inside_stack = bool(pending) and piece.stack is not None and piece.stack == pending[-1].stack
        is_full = filled >= bucket_size and not is_inside_stack
        if pending and (is_full or piece.alone or pending[-1].alone or piece.group != pending[0].group):
            close()
        filled = _align(filled, alignment) + piece.size if pending else piece.size
        pending.append(piece)
    close()
    return BufferPlan(num_parts, tuple(buckets))


def plan_by_parameters(pieces: Iterable[Piece], num_parts: int) -> BufferPlan:
    """Deal whole parameters to the parts, one bucket for each group, for optimizers that look at whole parameters.

    The largest parameter goes first, each to the part that holds least; so parts differ by at most the largest. All
    parts are padded to the extent of the fullest. Within a part, parameters lie in reverse order of use.

    Args:
        pieces: the parameters in order of use.
        num_parts: ranks that share the buffer.

    Raises:
        ParallelPlanError: for sizes below 1, negative pieces and doubled names.
    """
    pieces = _checked(pieces, num_parts)
    groups = dict.fromkeys(piece.group for piece in reversed(pieces))
    buckets: list[Bucket] = []
    for group in groups:
        members = [piece for piece in reversed(pieces) if piece.group == group]
        start = buckets[-1].stop if buckets else 0
        parts = [_placed(part, ALIGNMENT) for part in _deal(members, num_parts)]
        extent = max(_align(part[-1].stop if part else 0, _BUCKET_MULTIPLE) for part in parts)
        placed = tuple(
            Placed(item.name, start + index * extent + item.start, start + index * extent + item.stop)
            for index, part in enumerate(parts)
            for item in part
        )
        buckets.append(Bucket(start, start + num_parts * extent, placed, group))
    return BufferPlan(num_parts, tuple(buckets))


def _deal(pieces: Sequence[Piece], num_parts: int) -> list[list[Piece]]:
    # Loads count aligned extents, so that padding cannot unbalance what is really held.
    loads, owners = [0] * num_parts, {}
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        lightest = min(range(num_parts), key=loads.__getitem__)
        loads[lightest] += _align(piece.size, ALIGNMENT)
        owners[piece.name] = lightest
    return [[piece for piece in pieces if owners[piece.name] == part] for part in range(num_parts)]


def _placed(pieces: Sequence[Piece], alignment: int, start: int = 0) -> list[Placed]:
    placed: list[Placed] = []
    for piece in pieces:
        first = _align(placed[-1].stop if placed else start, alignment)
        placed.append(Placed(piece.name, first, first + piece.size))
    return placed


def _bucket(pieces: Sequence[Piece], start: int, alignment: int, multiple: int) -> Bucket:
    placed = _placed(pieces, alignment, start)
    return Bucket(start, _align(placed[-1].stop, multiple), tuple(placed), pieces[0].group)


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _checked(pieces: Iterable[Piece], num_parts: int, **sizes: int) -> list[Piece]:
    for name, size in {"num_parts": num_parts, **sizes}.items():
        require_positive(name, size)
    checked: dict[str, Piece] = {}
    for piece in pieces:
        if piece.name in checked:
            raise ParallelPlanError(
                f"a buffer holds each parameter once: {piece.name!r} is named twice. Its places would differ. "
                f"Name a shared parameter once."
            )
        if piece.size < 0:
            raise ParallelPlanError(
                f"a parameter has 0 elements or more: {piece.name!r} has {piece.size}. Use its number of elements."
            )
        checked[piece.name] = piece
    return list(checked.values())
