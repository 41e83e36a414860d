"""Assignment of the rows of a global batch to data ranks and microbatches by attention work.

Attention inside of documents costs the sum of the squares of their lengths, so rows of equally many
tokens have unequal work: a row of one document has as many times the work of a row of equal ones as
these are. A step waits for its slowest data rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lightning_megatron.errors import ParallelPlanError


class Documents(Protocol):
    """Samples that know the documents of each of their rows."""

    seq_length: int

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document in a window, in their order."""


@dataclass(frozen=True)
class RowBalance:
    """Assignment of each global batch's rows by the lengths of their documents alone.

    Every data rank computes the same assignment from the index, without communication and without
    reading a token. It changes who computes a row, and not which rows a global batch has.

    Args:
        samples: Samples, which know the documents of each row.
        num_ranks: Data ranks (ranks).
        microbatch_size: Rows of a microbatch; the rows of a rank are a multiple of it (samples).
    """

    samples: Documents
    num_ranks: int
    microbatch_size: int

    def shares(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the rows of each rank, microbatch after microbatch.

        Args:
            numbers: Rows of a global batch, the same number for each rank.

        Raises:
            ParallelPlanError: If they cannot be divided evenly.
        """
        work = dict(enumerate(map(self.work, numbers)))
        by_rank = balanced_shares(list(work.values()), self.num_ranks)
        in_turn = _in_order(len(numbers), self.num_ranks)
        if _most(work, by_rank) >= _most(work, in_turn):
            by_rank = in_turn
        found = []
        for share in by_rank:
            num_parts = max(1, len(share) // self.microbatch_size)
            own = [work[at] for at in share]
            parts = balanced_shares(own, num_parts)
            # Ranks that exchange tokens between experts wait for each other in every microbatch:
            # all of them begin with their dearest one.
            parts.sort(key=lambda part: (-sum(own[at] for at in part), part))
            found.append([numbers[share[at]] for part in parts for at in part])
        return found

    def work(self, number: int) -> int:
        """Return the attention work of a row: the sum of the squares of its documents' lengths.

        What the documents leave of a row is a document, too. The last token of a window is a label
        alone.

        Args:
            number: Number of the sample.
        """
        return attention_work(self.samples.lengths(number), self.samples.seq_length)

    def excess(self, batches: Iterable[Sequence[int]]) -> tuple[float, float]:
        """Return the work of the busiest rank relative to the mean: in order, and as assigned.

        Args:
            batches: Rows of some global batches.
        """
        ratios = []
        for numbers in batches:
            work = dict(zip(numbers, map(self.work, numbers), strict=True))
            mean = sum(work.values()) / self.num_ranks
            ranges = _in_order(len(numbers), self.num_ranks)
            before = [[numbers[at] for at in share] for share in ranges]
            ratios.append([_most(work, shares) / mean for shares in (before, self.shares(numbers))])
        in_turn, assigned = np.mean(ratios, axis=0).tolist()
        return in_turn, assigned


def attention_work(lengths: Sequence[int], seq_length: int) -> int:
    """Return the sum of the squares of the lengths of a row's documents.

    Args:
        lengths: Tokens of each document of a window, whose last token is a label alone (tokens).
        seq_length: Tokens of the row; what the documents leave of it is a document, too (tokens).
    """
    rest = seq_length + 1 - sum(lengths)
    return sum(n * n for n in (*lengths[:-1], lengths[-1] - 1, rest))


def balanced_shares(work: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divide items into shares of equally many, the largest of which has little work.

    Neighbours in the order of work form groups, of which every share gets one item. The two groups
    that differ most are joined, the dearest share of one with the cheapest of the other, until one
    group is left. Then the dearest share exchanges items with others as long as that helps.

    Args:
        work: Work of each item, in any unit.
        num_shares: Number of shares, which divides that of the items.

    Returns:
        Indices of the items of each share, rising; the shares by their first item

    Raises:
        ParallelPlanError: If the items cannot be divided evenly.

    Source: Karmarkar and Karp 1982 (differencing); Michiels et al. 2003 (equally many items).
    """
    if not work or len(work) % num_shares:
        raise ParallelPlanError(
            f"rows must divide evenly among shares: {len(work)} rows, {num_shares} shares. Every "
            f"data rank computes equally many rows. Use a multiple of {num_shares}."
        )
    order = sorted(range(len(work)), key=lambda item: (-work[item], item))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), num_shares):
        shares = [(work[item], [item]) for item in order[start : start + num_shares]]
        heapq.heappush(heap, (shares[-1][0] - shares[0][0], start, shares))
    # Numbers of groups break ties, so that all ranks join the same ones.
    for number in range(len(work), len(work) + len(heap) - 1):
        one = heapq.heappop(heap)[2]
        other = heapq.heappop(heap)[2]
        joined = [(a + b, own + more) for (a, own), (b, more) in zip(one, other[::-1], strict=True)]
        joined.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return sorted(sorted(items) for items in _exchanged(work, [own for _, own in heap[0][2]]))


def _exchanged(work: Sequence[int], shares: list[list[int]]) -> list[list[int]]:
    """Exchange the pair of items that helps the dearest share most, again and again."""
    items = np.array(shares)
    costs = np.array(work, np.int64)[items]
    # Every exchange lowers the largest sum, or how many shares have it; few are needed.
    for _ in range(4 * len(shares)):
        sums = costs.sum(1)
        most = int(sums.argmax())
        # By item of the dearest share, share and item of it.
        moved = costs[most][:, None, None] - costs[None]
        after = np.maximum(sums[most] - moved, sums[:, None] + moved)
        own, other, at = np.unravel_index(after.argmin(), after.shape)
        if after[own, other, at] >= sums[most]:
            break
        for table in (items, costs):
            table[most, own], table[other, at] = table[other, at], table[most, own]
    return items.tolist()


def _in_order(count: int, num_shares: int) -> list[list[int]]:
    size = count // num_shares
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(num_shares)]


def _most(work: Mapping[int, int], shares: Sequence[Sequence[int]]) -> int:
    return max(sum(work[one] for one in share) for share in shares)
