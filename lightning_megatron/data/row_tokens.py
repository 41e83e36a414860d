"""Tokens of the rows of files: one document or conversation per row, or two of a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.row_files import FileRow, read_rows

#: Factor of the file's index in the number of a row (rows).
_ROWS_PER_FILE = 2**40


class EncodedText(NamedTuple):
    """Tokens of a conversation or document.

    Args:
        is_answer: 1 for tokens of answers, 0 for other tokens.
        was_cut: Whether the end was cut off.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    was_cut: bool


#: Function that returns the texts of a row; None leaves the row out.
EncodeRow = Callable[[FileRow], tuple[EncodedText, ...] | None]


class EncodedRow(NamedTuple):
    """Row of a file after tokenization.

    Args:
        number: Number of the row among all rows of all files.
        texts: Texts of the row, as many in each row; None for a row that is left out.
    """

    number: int
    texts: tuple[EncodedText, ...] | None


class RowTokens(NamedTuple):
    """Concatenated tokens of several rows.

    Args:
        is_answer: 1 for tokens of answers, 0 for other tokens.
        bounds: Index of the first token of each text, and the total number of tokens.
        numbers: Number of each row that was not left out.
        num_read: Rows that were read (rows).
        num_cut: Rows of which the end of a text was cut off (rows).
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    bounds: npt.NDArray
    numbers: npt.NDArray
    num_read: int
    num_cut: int

    @classmethod
    def of(cls, rows: Sequence[EncodedRow]) -> RowTokens:
        """Concatenate the texts of rows.

        Args:
            rows: Rows in order.
        """
        tokens = [np.zeros(0, np.int32)]
        is_answer = [np.zeros(0, np.uint8)]
        numbers = []
        num_cut = 0
        for row in rows:
            if row.texts is None:
                continue
            numbers.append(row.number)
            num_cut += any(text.was_cut for text in row.texts)
            tokens += [text.tokens for text in row.texts]
            is_answer += [text.is_answer for text in row.texts]
        return cls(
            np.concatenate(tokens),
            np.concatenate(is_answer),
            np.cumsum(list(map(len, tokens)), dtype=np.int64),
            np.array(numbers, np.int64),
            len(rows),
            num_cut,
        )

    @classmethod
    def of_files(cls, paths: Sequence[Path], encode: EncodeRow) -> RowTokens:
        """Encode all rows of files, and concatenate their texts.

        Args:
            paths: Files of rows.
            encode: Function that returns the texts of a row.
        """
        return cls.of(
            [
                EncodedRow(row_number(file, row), encode(row))
                for file, path in enumerate(paths)
                for row in read_rows(path)
            ]
        )

    @property
    def num_left_out(self) -> int:
        """Number of rows that were left out (rows)."""
        return self.num_read - len(self.numbers)


def row_number(file: int, row: FileRow) -> int:
    """Return the number of a row: its position in its file, plus 2^40 times the file's index."""
    return file * _ROWS_PER_FILE + row.end.number - 1
