"""Rows of whole documents, packed by best fit so that rows have little padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.window_packing import GAP, best_fit, pack_windows


@dataclass(frozen=True)
class PackedIndex:
    """Index of rows that consist of whole documents.

    A document that is longer than a row is cut into pieces as long as a row. Consecutive pieces
    share one token, like neighbouring windows. The last, shorter piece is packed like a document.

    Args:
        parts: Document, offset in the document and number of tokens of each piece, in the order of
            the rows. A gap, which has positions but no tokens, is the document -1.
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
        """Return the largest number of documents and gaps in a row."""
        return int(np.diff(self.firsts).max(initial=0))

    def pieces(self, index: int, bounds: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the range of tokens of each piece of a row, in order.

        Args:
            bounds: Index of the first token of each document, and the total number of tokens.

        Returns:
            Start and end of each piece among all tokens; -n and 0 for a gap of n positions.
        """
        ranges = []
        for document, offset, size in self.parts[self.firsts[index] : self.firsts[index + 1]]:
            if document == GAP:
                ranges.append((-int(size), 0))
                continue
            start = int(bounds[document]) + int(offset)
            ranges.append((start, start + int(size)))
        return ranges


def index_packed(
    lengths: npt.NDArray[np.int64],
    seq_length: int,
    num_samples: int | None,
    seed: int | None,
    is_packed: bool = True,
    num_windows: int = 1,
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
        num_windows: Windows of a row, which groups of context-parallel ranks share. No document
            spans more windows than the longest document of its row needs.
    """
    pieces = _pieces(lengths, seq_length)
    rows: list[npt.NDArray[np.int64]] = []
    number = 0
    while len(pieces) and (number == 0 or (num_samples is not None and len(rows) < num_samples)):
        random = None if seed is None else np.random.RandomState([seed, number, 4])
        rows += _rows_of_pass(pieces, seq_length, random, is_packed, num_windows, None)
        number += 1
    return _indexed(rows[:num_samples])


def pack_once(
    lengths: npt.NDArray[np.int64],
    seq_length: int,
    random: np.random.RandomState | None,
    is_packed: bool,
    num_windows: int,
    max_pieces: int | None,
) -> PackedIndex:
    """Pack documents like one pass of :func:`index_packed`.

    Args:
        lengths: Tokens of each document. Documents of one token, which predict nothing, are left
            out.
        seq_length: Tokens that a row predicts; a row has one token more, its last label (tokens).
        random: Random number generator that shuffles documents and rows; None keeps their order.
        is_packed: Whether rows have several documents; otherwise each row has one.
        max_pieces: Largest number of documents and gaps of a row; None sets no limit.
    """
    pieces = _pieces(lengths, seq_length)
    return _indexed(_rows_of_pass(pieces, seq_length, random, is_packed, num_windows, max_pieces))


def _rows_of_pass(
    pieces: npt.NDArray[np.int64],
    seq_length: int,
    random: np.random.RandomState | None,
    is_packed: bool,
    num_windows: int,
    max_pieces: int | None,
) -> list[npt.NDArray[np.int64]]:
    ordered = pieces if random is None else pieces[random.permutation(len(pieces))]
    rows = _rows(ordered, seq_length, is_packed, num_windows, random, max_pieces)
    return rows if random is None else [rows[index] for index in random.permutation(len(rows))]


def _indexed(rows: Sequence[npt.NDArray[np.int64]]) -> PackedIndex:
    firsts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return PackedIndex(np.concatenate([np.zeros((0, 3), np.int64), *rows]), firsts)


def _rows(
    pieces: npt.NDArray[np.int64],
    seq_length: int,
    is_packed: bool,
    num_windows: int,
    random: np.random.RandomState | None,
    max_pieces: int | None,
) -> list[npt.NDArray[np.int64]]:
    """Return the document, offset and number of tokens of the pieces and gaps of each row."""
    if not is_packed:
        return [pieces[item : item + 1] for item in range(len(pieces))]
    if num_windows == 1:
        return [pieces[row] for row in best_fit(pieces[:, 2], seq_length + 1, max_pieces)]
    rows = []
    for row in pack_windows(pieces[:, 2], seq_length, num_windows, random, max_pieces):
        parts = [[GAP, 0, size] if item == GAP else pieces[item] for item, size in row]
        rows.append(np.array(parts))
    return rows


def _pieces(lengths: npt.NDArray[np.int64], seq_length: int) -> npt.NDArray[np.int64]:
    """Return the document, offset and number of tokens of each piece, at most a row long."""
    lengths = np.asarray(lengths, np.int64)
    counts = -(-np.maximum(lengths - 1, 0) // seq_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(documents)) - np.repeat(counts.cumsum() - counts, counts)) * seq_length
    sizes = np.minimum(lengths[documents] - offsets, seq_length + 1)
    return np.stack([documents, offsets, sizes], axis=1)
