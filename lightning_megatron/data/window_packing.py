"""Packing of documents: by best fit into rows, and into windows that groups of context-parallel
ranks share.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.context import legal_context_lengths
from lightning_megatron.plan.settings import join_or, powers_of_two_around

#: Number of a gap, which takes positions of a row but has no tokens, instead of a document's.
GAP = -1
#: Smallest size of an item (tokens).
_MIN_SIZE = 2


def check_context_windows(num_windows: int, seq_length: int, is_whole: bool) -> None:
    """Check that rows can be divided into windows for groups of context-parallel ranks.

    Args:
        seq_length: Tokens that a row predicts (tokens).
        is_whole: Whether rows consist of whole documents.

    Raises:
        ParallelPlanError: If the number of windows is not a power of two, or twice this number does
            not divide ``seq_length``.
        UnsupportedError: If rows do not consist of whole documents.
    """
    if num_windows == 1:
        return
    if num_windows & (num_windows - 1):
        raise ParallelPlanError(
            f"context_windows ({num_windows}) must be a power of two, because groups of 1, 2, 4 "
            "... ranks of cp share windows. Use "
            f"{join_or(powers_of_two_around(num_windows))}."
        )
    if seq_length % (2 * num_windows):
        legal = legal_context_lengths(seq_length, 2 * num_windows)
        raise ParallelPlanError(
            f"seq_length ({seq_length}) must be a multiple of 2 * context_windows "
            f"({2 * num_windows}), because each rank of cp holds two pieces of a row. Use "
            f"{join_or(legal)}."
        )
    if not is_whole:
        raise UnsupportedError(
            f"context_windows ({num_windows}) needs documents='whole', because other rows do not "
            "keep documents within windows. Use documents='whole', or leave context_windows out."
        )


def pack_windows(
    sizes: npt.NDArray[np.int64],
    seq_length: int,
    num_windows: int,
    random: np.random.RandomState | None,
    max_pieces: int | None = None,
) -> list[list[tuple[int, int]]]:
    """Pack documents into rows so that no document spans more windows than the longest one needs.

    A span consists of 1, 2, 4 ... neighbouring windows, and begins at a multiple of its length.
    Documents are packed into spans by best fit, the longest first; a document that fits into no
    open span opens the smallest span that can hold it. Rows are filled with spans, the longest
    first.

    Args:
        sizes: Tokens of each document, from 2 to ``seq_length + 1`` (tokens).
        seq_length: Tokens that a row predicts (tokens).
        num_windows: Windows of a row, a power of two.
        random: Random number generator that shuffles the spans; None keeps their order.
        max_pieces: Largest number of documents and gaps in a row, at least two for each window;
            None sets no limit.

    Returns:
        Documents of each row, each with its number of positions. Gaps have the number ``GAP``, and
        extend to the end of their span (positions).
    """
    window = seq_length // num_windows
    # Number of windows that each document needs, rounded up to a power of two.
    needed = np.minimum(-(-sizes // window), num_windows)
    spans = 1 << np.ceil(np.log2(needed)).astype(np.int64)
    # The last token of a row is only a label, and takes no position.
    capacities = spans * window + (spans == num_windows)
    # Subtract one for the gap with which a span may end.
    max_items = None if max_pieces is None else max_pieces * spans // num_windows - 1
    packed = best_fit(sizes, capacities, max_items)
    by_span: dict[int, list[list[tuple[int, int]]]] = {}
    for items in packed if random is None else _shuffled(packed, random):
        # The first item is the longest, which opened the span.
        span = int(spans[items[0]])
        filled = [(item, int(sizes[item])) for item in items]
        by_span.setdefault(span, []).append(_with_gap(filled, span * window))
    return [list(chain(*row)) for row in _rows_of_spans(by_span, num_windows, window)]


def _with_gap(pieces: list[tuple[int, int]], capacity: int) -> list[tuple[int, int]]:
    rest = capacity - sum(size for _, size in pieces)
    return [*pieces, (GAP, rest)] if rest > 0 else pieces


def _rows_of_spans(
    by_span: dict[int, list[list[tuple[int, int]]]], num_windows: int, window: int
) -> list[list[list[tuple[int, int]]]]:
    """Fill rows with spans, the longest first, so that each begins at a multiple of its length."""
    rows: list[list[list[tuple[int, int]]]] = []
    free = 0
    for span in sorted(by_span, reverse=True):
        for pieces in by_span[span]:
            if free < span:
                rows.append([])
                free = num_windows
            rows[-1].append(pieces)
            free -= span
    # Each free window of the last row gets a gap, so that no gap spans two windows.
    for _ in range(free):
        rows[-1].append([(GAP, window)])
    return rows


def _shuffled(rows: Sequence[list[int]], random: np.random.RandomState) -> list[list[int]]:
    return [rows[index] for index in random.permutation(len(rows))]


def best_fit(
    sizes: npt.NDArray[np.int64],
    capacity: int | npt.NDArray[np.int64],
    most_items: int | npt.NDArray[np.int64] | None = None,
) -> list[list[int]]:
    """Pack items into rows by best fit: the largest item first, into the fullest row that fits it.

    Args:
        sizes: Size of each item, from 2 to the capacity (tokens).
        capacity: Size of all rows, or for each item the size of a row that starts with this item
            (tokens).
        most_items: Largest number of items of all rows, or for each item that of a row that starts
            with this item; None sets no limit.

    Returns:
        Indices of the items of each row.

    Source: Ding et al. 2024 (https://arxiv.org/abs/2404.10830).
    """
    rows: list[list[int]] = []
    #: Open rows by their free space, and all amounts of free space in ascending order.
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    capacities = np.broadcast_to(capacity, sizes.shape)
    limits = np.broadcast_to(len(sizes) if most_items is None else most_items, sizes.shape)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        index = bisect_left(spaces, size)
        if index == len(spaces):
            space = int(capacities[item])
            row = len(rows)
            rows.append([])
        else:
            space = spaces[index]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[index]
        rows[row].append(item)
        if space - size >= _MIN_SIZE and len(rows[row]) < limits[rows[row][0]]:
            if space - size not in by_space:
                by_space[space - size] = []
                insort(spaces, space - size)
            by_space[space - size].append(row)
    return rows
