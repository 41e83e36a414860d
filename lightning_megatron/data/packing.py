"""Rows of whole documents, packed by best fit so that rows have little padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Smallest size of an item (tokens).
_MIN_SIZE = 2


@dataclass(frozen=True)
class PackedIndex:
    """Index of rows that consist of whole documents.

    A document that is longer than a row is cut into pieces as long as a row. Consecutive pieces
    share one token, like neighbouring windows. The last, shorter piece is packed like a document.

    Args:
        parts: Document, offset in the document and number of tokens of each piece, in the order of
            the rows.
        firsts: Index of the first piece of each row, and the total number of pieces.
    """

    parts: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int64]

    @property
    def num_windows(self) -> int:
        """Return the number of rows."""
        return len(self.firsts) - 1

    @property
    def max_pieces(self) -> int:
        """Return the largest number of pieces in a row."""
        return int(np.diff(self.firsts).max(initial=0))

    def pieces(self, index: int, bounds: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the range of tokens of each piece of a row, in order.

        Args:
            bounds: Index of the first token of each document, and the total number of tokens.

        Returns:
            Start and end of each piece among all tokens.
        """
        ranges = []
        for document, offset, size in self.parts[self.firsts[index] : self.firsts[index + 1]]:
            start = int(bounds[document]) + int(offset)
            ranges.append((start, start + int(size)))
        return ranges


def index_packed(
    lengths: npt.NDArray[np.int64],
    seq_length: int,
    num_samples: int | None,
    seed: int | None,
    is_packed: bool = True,
) -> PackedIndex:
    """Pack the documents of one or several passes; each pass is shuffled and packed separately.

    All passes have the same number of rows, because best fit depends only on the lengths; the
    shuffle exchanges documents of equal length. A larger ``num_samples`` extends the order.

    Args:
        lengths: Tokens of each document. Documents of one token, which predict nothing, are left
            out.
        seq_length: Tokens that a row predicts; a row has one token more, its last label (tokens).
        num_samples: Number of rows, over as many passes as needed; None makes one pass (samples).
        seed: Seed of the shuffles; None keeps the order.
        is_packed: Whether rows have several documents; otherwise each row has one.
    """
    pieces = _pieces(lengths, seq_length)
    rows: list[npt.NDArray[np.int64]] = []
    number = 0
    while len(pieces) and (number == 0 or (num_samples is not None and len(rows) < num_samples)):
        random = None if seed is None else np.random.RandomState([seed, number, 4])
        rows += _rows_of_pass(pieces, seq_length, random, is_packed, None)
        number += 1
    return _indexed(rows[:num_samples])


def pack_once(
    lengths: npt.NDArray[np.int64],
    seq_length: int,
    random: np.random.RandomState | None,
    is_packed: bool,
    max_pieces: int | None,
) -> PackedIndex:
    """Pack documents like one pass of :func:`index_packed`.

    Args:
        lengths: Tokens of each document. Documents of one token, which predict nothing, are left
            out.
        seq_length: Tokens that a row predicts; a row has one token more, its last label (tokens).
        random: Random number generator that shuffles documents and rows; None keeps their order.
        is_packed: Whether rows have several documents; otherwise each row has one.
        max_pieces: Largest number of pieces of a row; None sets no limit.
    """
    pieces = _pieces(lengths, seq_length)
    return _indexed(_rows_of_pass(pieces, seq_length, random, is_packed, max_pieces))


def _rows_of_pass(
    pieces: npt.NDArray[np.int64],
    seq_length: int,
    random: np.random.RandomState | None,
    is_packed: bool,
    max_pieces: int | None,
) -> list[npt.NDArray[np.int64]]:
    ordered = pieces if random is None else pieces[random.permutation(len(pieces))]
    if is_packed:
        rows = [ordered[row] for row in best_fit(ordered[:, 2], seq_length + 1, max_pieces)]
    else:
        rows = [ordered[item : item + 1] for item in range(len(ordered))]
    return rows if random is None else [rows[index] for index in random.permutation(len(rows))]


def _indexed(rows: Sequence[npt.NDArray[np.int64]]) -> PackedIndex:
    firsts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return PackedIndex(np.concatenate([np.zeros((0, 3), np.int64), *rows]), firsts)


def _pieces(lengths: npt.NDArray[np.int64], seq_length: int) -> npt.NDArray[np.int64]:
    """Return the document, offset and number of tokens of each piece, at most a row long."""
    lengths = np.asarray(lengths, np.int64)
    counts = -(-np.maximum(lengths - 1, 0) // seq_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(documents)) - np.repeat(counts.cumsum() - counts, counts)) * seq_length
    sizes = np.minimum(lengths[documents] - offsets, seq_length + 1)
    return np.stack([documents, offsets, sizes], axis=1)


def best_fit(
    sizes: npt.NDArray[np.int64],
    capacity: int,
    most_items: int | None = None,
) -> list[list[int]]:
    """Pack items into rows by best fit: the largest item first, into the fullest row that fits it.

    Args:
        sizes: Size of each item, from 2 to the capacity (tokens).
        capacity: Size of a row (tokens).
        most_items: Largest number of items of a row; None sets no limit.

    Returns:
        Indices of the items of each row.

    Source: Ding et al. 2024 (https://arxiv.org/abs/2404.10830).
    """
    rows: list[list[int]] = []
    #: Open rows by their free space, and all amounts of free space in ascending order.
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    limit = len(sizes) if most_items is None else most_items
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        index = bisect_left(spaces, size)
        if index == len(spaces):
            space = capacity
            row = len(rows)
            rows.append([])
        else:
            space = spaces[index]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[index]
        rows[row].append(item)
        if space - size >= _MIN_SIZE and len(rows[row]) < limit:
            if space - size not in by_space:
                by_space[space - size] = []
                insort(spaces, space - size)
            by_space[space - size].append(row)
    return rows
