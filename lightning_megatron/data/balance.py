"""Assignment of the rows of a global batch to data ranks and microbatches by attention work.

Attention within documents costs the sum of the squares of their lengths, so rows with the same
number of tokens have different work: a row of one document has n times the work of a row of n
documents of equal length. A step waits for its slowest data rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megatron.data.samples import Windows
from lightning_megatron.errors import ParallelPlanError


@dataclass(frozen=True)
class RowBalance:
    """Assignment of the rows of each global batch to data ranks by the lengths of their documents.

    Every data rank computes the same assignment from the index, without communication and without
    reading tokens. The assignment changes which rank computes a row, but not which rows a global
    batch has.

    Args:
        samples: Samples, which know the lengths of the documents in each row.
        num_ranks: Data ranks (ranks).
        microbatch_size: Rows of a microbatch; the rows of a rank are a multiple of it (samples).
    """

    samples: Windows
    num_ranks: int
    microbatch_size: int

    def shares(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the rows of each rank, ordered by microbatch.

        Args:
            numbers: Sample numbers of a global batch; the number of ranks must divide their count.
        """
        work = dict(enumerate(map(self.work, numbers)))
        by_rank = balanced_shares(list(work.values()), self.num_ranks)
        contiguous = _contiguous_shares(len(numbers), self.num_ranks)
        if _max_work(work, by_rank) >= _max_work(work, contiguous):
            by_rank = contiguous
        balanced = []
        for share in by_rank:
            num_parts = max(1, len(share) // self.microbatch_size)
            work_of_rows = [work[index] for index in share]
            parts = balanced_shares(work_of_rows, num_parts)
            # Ranks that exchange tokens between experts wait for each other in every microbatch,
            # so all of them start with the microbatch that has the most work.
            parts.sort(key=lambda part: (-sum(work_of_rows[index] for index in part), part))
            balanced.append([numbers[share[index]] for part in parts for index in part])
        return balanced

    def work(self, number: int) -> int:
        """Return the attention work of a row; see :func:`attention_work`."""
        return attention_work(self.samples.lengths(number), self.samples.seq_length)

    def imbalance(self, batches: Iterable[Sequence[int]]) -> tuple[float, float]:
        """Return the mean ratio of the busiest rank's work to the mean work of the ranks.

        Returns:
            Ratio for contiguous shares of each batch, and ratio for the shares of :meth:`shares`.
        """
        ratios = []
        for numbers in batches:
            work = dict(zip(numbers, map(self.work, numbers), strict=True))
            mean = sum(work.values()) / self.num_ranks
            ranges = _contiguous_shares(len(numbers), self.num_ranks)
            contiguous = [list(map(numbers.__getitem__, share)) for share in ranges]
            divisions = (contiguous, self.shares(numbers))
            ratios.append([_max_work(work, shares) / mean for shares in divisions])
        before, after = np.mean(ratios, axis=0).tolist()
        return before, after


def attention_work(lengths: Sequence[int], seq_length: int) -> int:
    """Return the attention work of a row: the sum of the squares of its documents' lengths.

    The last token of a window is only a label and does not count. Padding after the documents
    counts as a document.

    Args:
        lengths: Tokens of each document in the window (tokens).
        seq_length: Input tokens of the row, one fewer than those of a full window (tokens).
    """
    rest = seq_length + 1 - sum(lengths)
    return sum(n * n for n in (*lengths[:-1], lengths[-1] - 1, rest))


def balanced_shares(work: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divide items into shares of the same number of items, so that the largest work is small.

    The items are sorted by work and cut into groups of ``num_shares`` neighbours, so that each
    share gets one item of every group. The two groups whose shares differ most are merged, the
    share with the most work of one with the share with the least work of the other, until one group
    is left. Then the share with the most work exchanges items with others until no exchange reduces
    the largest work.

    Args:
        num_shares: Number of shares, which must divide the number of items.

    Returns:
        Ascending indices of the items of each share; the shares are sorted by their first item.

    Source: Karmarkar and Karp 1982 (differencing); Michiels et al. 2003 (shares of equal size).
    """
    if not work or len(work) % num_shares:
        raise ParallelPlanError(
            f"rows must divide evenly among shares: {len(work)} rows, {num_shares} shares. Every "
            f"data rank computes the same number of rows. Use a multiple of {num_shares} rows."
        )
    order = sorted(range(len(work)), key=lambda item: (-work[item], item))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), num_shares):
        shares = [(work[item], [item]) for item in order[start : start + num_shares]]
        heapq.heappush(heap, (shares[-1][0] - shares[0][0], start, shares))
    # The number of a group breaks ties, so that all ranks merge the same groups.
    for number in range(len(work), len(work) + len(heap) - 1):
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        merged = [
            (a + b, items + more) for (a, items), (b, more) in zip(first, second[::-1], strict=True)
        ]
        merged.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    shares_of_items = _exchanged(work, [items for _, items in heap[0][2]])
    return sorted(map(sorted, shares_of_items))


def _exchanged(work: Sequence[int], shares: list[list[int]]) -> list[list[int]]:
    """Exchange items between the share with the most work and others, the best pair first."""
    items = np.array(shares)
    costs = np.array(work, np.int64)[items]
    # Every exchange lowers the largest sum, or the number of shares that have it; few are needed.
    for _ in range(4 * len(shares)):
        sums = costs.sum(1)
        largest = int(sums.argmax())
        # Axes: item of the share with the most work, other share, item of the other share.
        moved = costs[largest][:, None, None] - costs[None]
        largest_after = np.maximum(sums[largest] - moved, sums[:, None] + moved)
        given_item, share, taken_item = np.unravel_index(
            largest_after.argmin(), largest_after.shape
        )
        if largest_after[given_item, share, taken_item] >= sums[largest]:
            break
        for table in (items, costs):
            table[largest, given_item], table[share, taken_item] = (
                table[share, taken_item],
                table[largest, given_item],
            )
    return items.tolist()


def _contiguous_shares(count: int, num_shares: int) -> list[list[int]]:
    size = count // num_shares
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(num_shares)]


def _max_work(work: Mapping[int, int], shares: Sequence[Sequence[int]]) -> int:
    return max(sum(map(work.__getitem__, share)) for share in shares)
