"""Zig-zag cut of sequences over the ranks of context parallelism, and the work of their attention.

A sequence is cut into 2 cp equal pieces, and rank r holds the pieces r and 2 cp - 1 - r. Under
causal attention a query attends only to earlier keys, so the early piece of a rank costs as much
less than the mean as its late piece costs more, and all ranks have the same work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import join_or


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of some queries to some keys, with one rule for all of them.

    Query ``i``, counted from the start of its range, attends to key ``j`` if
    ``is_causal`` is False, or if ``0 <= offset + i - j < window``.

    Args:
        is_causal: Whether queries see the keys at or before their own position only.
        offset: Position of the first query minus that of the first key; 0 if not causal (tokens).
        window: Number of positions that a query sees, itself included; None means all (tokens).
    """

    queries: range
    keys: range
    is_causal: bool = False
    offset: int = 0
    window: int | None = None

    @property
    def num_pairs(self) -> int:
        """Return the number of pairs of a query and a key to which it attends."""
        if not self.is_causal:
            return len(self.queries) * len(self.keys)
        total = 0
        for i in range(len(self.queries)):
            last = min(self.offset + i, len(self.keys) - 1)
            first = 0 if self.window is None else max(0, self.offset + i - self.window + 1)
            total += max(0, last - first + 1)
        return total


@dataclass(frozen=True)
class ContextCut:
    """Zig-zag cut of a sequence over ``size`` ranks.

    A rank's tokens are those of its two pieces, the earlier piece first.

    Raises:
        ParallelPlanError: If the length is not a multiple of ``2 size``.
    """

    size: int
    seq_length: int

    def __post_init__(self) -> None:
        check_context_length(self.seq_length, self.size)

    @property
    def piece(self) -> int:
        """Return the length of a piece (tokens)."""
        return self.seq_length // (2 * self.size)

    @property
    def local_length(self) -> int:
        """Return the number of tokens of a rank (tokens)."""
        return self.seq_length // self.size

    def pieces(self, rank: int) -> tuple[int, int]:
        """Return the indices of a rank's two pieces."""
        return rank, 2 * self.size - 1 - rank

    def ranges(self, rank: int) -> tuple[range, range]:
        """Return the positions of a rank's two pieces."""
        early, late = self.pieces(rank)
        return self._positions_of(early), self._positions_of(late)

    def positions(self, rank: int) -> list[int]:
        """Return the position of each token of a rank, in the order in which it holds them."""
        early, late = self.ranges(rank)
        return [*early, *late]

    def sequence_order(self) -> list[int]:
        """Return the order that sorts the pieces of all ranks, whose parts were joined by rank.

        Entry ``i`` is the place among the joined pieces of the one that comes ``i``-th in the
        sequence.
        """
        places = [piece for rank in range(self.size) for piece in self.pieces(rank)]
        return sorted(range(len(places)), key=places.__getitem__)

    def _positions_of(self, piece: int) -> range:
        return range(piece * self.piece, (piece + 1) * self.piece)

    def ring_blocks(
        self, rank: int, source: int, causal: bool, window: int | None = None
    ) -> list[AttentionBlock]:
        """Return the attention of a rank's queries to the keys of a rank of the ring.

        Rows count within the parts of the two ranks. Without a window no block needs a mask but the
        causal one: all queries attend to the early piece of an earlier rank, and the queries of the
        late piece attend to all keys of a later rank.

        Args:
            window: Number of positions that a query sees, itself included; None means all. Only
                with ``causal`` (tokens).
        """
        half = self.piece
        all_rows = range(2 * half)
        if not causal:
            return [AttentionBlock(all_rows, all_rows)]
        if window is not None:
            return list(self._windowed(rank, source, window))
        if source == rank:
            return [AttentionBlock(all_rows, all_rows, is_causal=True)]
        if source < rank:
            return [AttentionBlock(all_rows, range(half))]
        return [AttentionBlock(range(half, 2 * half), all_rows)]

    def _windowed(self, rank: int, source: int, window: int) -> Iterator[AttentionBlock]:
        half = self.piece
        for i, query_piece in enumerate(self.pieces(rank)):
            for j, key_piece in enumerate(self.pieces(source)):
                offset = (query_piece - key_piece) * half
                if offset < 0 or offset - half + 1 >= window:
                    continue
                # The last queries see none of these keys, and none of these queries sees the first
                # keys. Without them, the window of the last query includes the last key.
                far = max(0, offset - window + 1)
                queries = range(i * half, (i + 1) * half - far)
                keys = range(j * half + far, (j + 1) * half)
                offset -= far
                if offset >= half and offset + half <= window:
                    yield AttentionBlock(queries, keys)
                else:
                    visible = None if half <= window and not offset else window
                    yield AttentionBlock(
                        queries, keys, is_causal=True, offset=offset, window=visible
                    )

    def gathered_blocks(
        self, rank: int, causal: bool, window: int | None = None
    ) -> list[AttentionBlock]:
        """Return the attention of a rank's queries to the keys of the whole sequence, in its order.

        Args:
            window: Number of positions that a query sees, itself included; None means all. Only
                with ``causal`` (tokens).
        """
        if not causal:
            return [AttentionBlock(range(self.local_length), range(self.seq_length))]
        blocks = []
        for i, positions in enumerate(self.ranges(rank)):
            first = 0 if window is None else max(0, positions.start - window + 1)
            blocks.append(
                AttentionBlock(
                    range(i * self.piece, (i + 1) * self.piece),
                    range(first, positions.stop),
                    is_causal=True,
                    offset=positions.start - first,
                    window=window if window is not None and window < positions.stop else None,
                )
            )
        return blocks


def context_multiple(cp: int, sequence_shards: int = 1) -> int:
    """Return the number that the length of a sequence must be a multiple of (tokens).

    Args:
        sequence_shards: Ranks that share the tokens of a cp rank: tp under sequence parallelism,
            else 1 (ranks).
    """
    if cp == 1:
        return sequence_shards
    return cp * lcm(2, sequence_shards)


def check_context_length(seq_length: int, cp: int, sequence_shards: int = 1) -> None:
    """Raise if a sequence cannot be cut zig-zag over cp ranks.

    Args:
        sequence_shards: Ranks that share the tokens of a cp rank: tp under sequence parallelism,
            else 1 (ranks).

    Raises:
        ParallelPlanError: If the length is not a multiple of ``2 cp``, or the tokens of a cp rank
            do not divide by ``sequence_shards``.
    """
    multiple = context_multiple(cp, sequence_shards)
    if cp == 1 or seq_length % multiple == 0:
        return
    shared = f"2 cp ({2 * cp})"
    why = "each rank holds two of 2 cp equal pieces of the sequence"
    if sequence_shards > 1:
        shared = f"{multiple}, for cp ({cp}) and tp ({sequence_shards}) under sequence parallelism"
        why += ", and its tp ranks share them evenly"
    below = seq_length // multiple * multiple
    legal = [length for length in (below, below + multiple) if length]
    raise ParallelPlanError(
        f"seq_length ({seq_length}) must be a multiple of {shared}, because {why}. Use "
        f"{join_or(legal)}."
    )


def split_heads_over(heads: int, ranks: int) -> list[range]:
    """Return the heads of each rank: neighbouring heads, whose numbers differ by at most one."""
    stops = [-(-heads * (rank + 1) // ranks) for rank in range(ranks)]
    return [range(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def kv_heads_of(queries: range, heads: int, kv_heads: int) -> Sequence[int]:
    """Return the key/value heads that attention over some query heads needs, in order.

    The query heads divide evenly among the returned heads. A key/value head is listed once if its
    query heads allow that, and otherwise once for each of them.

    Args:
        queries: Query heads of a rank.
        heads: Query heads of all ranks (heads).
        kv_heads: Key/value heads of all ranks (heads).
    """
    group = heads // kv_heads
    needed = [head // group for head in queries]
    once = list(dict.fromkeys(needed))
    counts = {needed.count(head) for head in once}
    return once if len(counts) <= 1 else needed
