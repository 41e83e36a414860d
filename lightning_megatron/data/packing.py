"""Rows of whole documents, packed by best fit so that rows have about equally many tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: A piece of one token predicts nothing.
_LEAST = 2


@dataclass(frozen=True)
class PackedIndex:
    """Index of rows that consist of whole documents.

    A document that is longer than a row is cut into pieces of a row, which share one token as
    neighbouring windows do. What is left of it is packed like a document.

    Args:
        parts: Document, offset in it and tokens of each piece, in the order of the rows.
        firsts: First piece of each row, and as the last entry the number of pieces.
    """

    parts: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int64]

    @property
    def num_windows(self) -> int:
        """Return the number of rows."""
        return len(self.firsts) - 1

    @property
    def most_pieces(self) -> int:
        """Return the largest number of documents that a row has tokens of."""
        return int(np.diff(self.firsts).max(initial=0))

    def pieces(self, index: int, bounds: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return where the tokens of a row lie, document by document, in their order.

        Args:
            index: Number of the row.
            bounds: First token of each document, and the end of the last one.

        Returns:
            First token and end of each piece
        """
        found = []
        for document, offset, size in self.parts[self.firsts[index] : self.firsts[index + 1]]:
            start = int(bounds[document]) + int(offset)
            found.append((start, start + int(size)))
        return found


def index_packed(
    lengths: npt.NDArray[np.int64], seq_length: int, num_samples: int | None, seed: int | None
) -> PackedIndex:
    """Pack the documents of one or several passes, each of them by itself and in another order.

    All passes have equally many rows, because the best fit depends on the lengths alone; documents
    of equal length take each other's places. More samples extend the order of fewer.

    Args:
        lengths: Tokens of each document; those of one token, which predict nothing, are left out.
        seq_length: Tokens that a row predicts; it has one more as its last label (tokens).
        num_samples: Rows over as many passes as needed; None makes one pass (samples).
        seed: Seed of the shuffles; None keeps the order.
    """
    pieces = _pieces(lengths, seq_length)
    if not len(pieces):
        return PackedIndex(np.zeros((0, 3), np.int64), np.zeros(1, np.int64))
    parts: list[npt.NDArray[np.int64]] = []
    sizes: list[int] = []
    number = 0
    while number == 0 or (num_samples is not None and len(sizes) < num_samples):
        random = None if seed is None else np.random.RandomState([seed, number, 4])
        own = pieces if random is None else pieces[random.permutation(len(pieces))]
        rows = best_fit(own[:, 2], seq_length + 1)
        order = range(len(rows)) if random is None else random.permutation(len(rows))
        for row in order:
            parts.append(own[rows[row]])
            sizes.append(len(rows[row]))
        number += 1
    kept = len(sizes) if num_samples is None else num_samples
    firsts = np.concatenate([[0], np.cumsum(sizes[:kept])]).astype(np.int64)
    return PackedIndex(np.concatenate(parts[:kept]), firsts)


def best_fit(sizes: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Put items into rows, the largest first, each where the least room is left.

    Args:
        sizes: Size of each item, from 2 to the capacity (tokens).
        capacity: Size of a row (tokens).

    Returns:
        Items of each row

    Source: Ding et al. 2024 (https://arxiv.org/abs/2404.10830).
    """
    rows: list[list[int]] = []
    #: Rows by the room that they have, and all rooms in their order.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, size)
        room = capacity
        if at == len(rooms):
            row = len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(item)
        if room - size >= _LEAST:
            if room - size not in with_room:
                with_room[room - size] = []
                insort(rooms, room - size)
            with_room[room - size].append(row)
    return rows


def _pieces(lengths: npt.NDArray[np.int64], seq_length: int) -> npt.NDArray[np.int64]:
    """Return document, offset and tokens of each piece of the documents, none above a row's."""
    lengths = np.asarray(lengths, np.int64)
    counts = -(-np.maximum(lengths - 1, 0) // seq_length)
    documents = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(documents)) - np.repeat(counts.cumsum() - counts, counts)) * seq_length
    sizes = np.minimum(lengths[documents] - offsets, seq_length + 1)
    return np.stack([documents, offsets, sizes], axis=1)
