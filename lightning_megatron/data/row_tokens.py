"""Tokens of the rows of files: one document or conversation per row, or two of a pair."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.index_cache import cache_key, load_or_build
from lightning_megatron.data.input_files import Document, files_of
from lightning_megatron.data.row_files import FileRow, read_rows
from lightning_megatron.errors import CorruptDataError

#: Factor of the file's index in the number of a row (rows).
_ROWS_PER_FILE = 2**40
#: Arrays of rows that a cache keeps, besides their counts.
_ARRAYS = ("tokens", "is_answer", "bounds", "numbers")


class EncodedText(NamedTuple):
    """Tokens of a conversation or document.

    Args:
        is_answer: 1 for tokens of answers, 0 for other tokens.
        was_cut: Whether the end was cut off.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    was_cut: bool


class EncodedRow(NamedTuple):
    """Row of a file after tokenization.

    Args:
        number: Number of the row among all rows of all files.
        texts: Texts of the row, as many in each row; None for a row that is left out.
    """

    number: int
    texts: tuple[EncodedText, ...] | None


@dataclass(frozen=True, eq=False)
class RowTokens:
    """Concatenated tokens of several rows.

    Args:
        is_answer: 1 for tokens of answers, 0 for other tokens.
        bounds: Index of the first token of each text, and the total number of tokens.
        numbers: Number of each row that was not left out.
        num_read: Rows that were read (rows).
        num_cut: Rows of which the end of a text was cut off (rows).
        key: Hash of everything that determines the rows of whole files.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    bounds: npt.NDArray
    numbers: npt.NDArray
    num_read: int
    num_cut: int
    key: str = ""

    def __len__(self) -> int:
        return len(self.numbers)

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

    @property
    def num_left_out(self) -> int:
        """Number of rows that were left out (rows)."""
        return self.num_read - len(self.numbers)


def row_number(file: int, row: FileRow) -> int:
    """Return the number of a row: its position in its file, plus 2^40 times the file's index."""
    return file * _ROWS_PER_FILE + row.end.number - 1


class StreamCounts(NamedTuple):
    """Counts of the rows, tokens and samples of a pass over files so far.

    Args:
        num_read: Rows of files that were read (rows).
        num_cut: Rows of files whose end was cut off (rows).
        num_left_out: Rows of files that were too long or too short, and were left out (rows).
        num_tokens: Tokens of the remaining rows (tokens).
        num_answers: Tokens of answers among them (tokens).
        num_samples: Samples that these tokens make: packed rows, or pairs (samples).
    """

    num_read: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_answers: int = 0
    num_samples: int = 0

    def after(self, rows: RowTokens, num_samples: int = 0) -> StreamCounts:
        """Return the counts after one more section.

        Args:
            rows: Rows of the section.
            num_samples: Samples that they make (samples).
        """
        added = (
            rows.num_read,
            rows.num_cut,
            rows.num_left_out,
            int(rows.bounds[-1]),
            int(rows.is_answer.sum()),
            num_samples,
        )
        return StreamCounts(*(count + addend for count, addend in zip(self, added, strict=True)))

    def fill(self, seq_length: int) -> str:
        """Return how many packed rows there are, and how full they are; empty without any.

        Args:
            seq_length: Tokens that a packed row predicts (tokens).
        """
        if not self.num_samples:
            return ""
        full = self.num_tokens / (self.num_samples * (seq_length + 1))
        return f", in {self.num_samples} rows, which are {full:.1%} full"


class RowEncoder(ABC):
    """Encoder of the rows of files, which worker processes unpickle."""

    #: Tokens that a row predicts (tokens).
    seq_length: int
    #: Unit of plain text that is a row.
    document: Document = "file"

    @property
    @abstractmethod
    def key(self) -> dict[str, Any]:
        """Fields on which the tokens depend, except the files, as JSON."""

    @abstractmethod
    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        """Return the texts of a row, as many for each row; None leaves the row out.

        Raises:
            CorruptDataError: If the row has another form; the message names file and row.
        """

    @abstractmethod
    def summary(self, counts: StreamCounts) -> str:
        """Return how many rows were read and left out, and how many samples they make."""

    @abstractmethod
    def empty_error(self, names: str, counts: StreamCounts) -> CorruptDataError:
        """Return the error for files without any row to train on."""

    def encode_files(self, paths: Sequence[Path]) -> RowTokens:
        """Encode all rows of files, and concatenate their texts.

        Raises:
            CorruptDataError: If no row remains.
        """
        return self._not_empty(self._encode(paths), paths)

    def encode_once(self, paths: Sequence[Path], cache_dir: Path) -> RowTokens:
        """Return the rows of files, which are encoded once and kept in a cache.

        Args:
            cache_dir: Folder of the encoded tokens.

        Raises:
            CorruptDataError: If no row remains, in the files or in the cache.
        """
        fields = {"files": [_sha256(path) for path in paths], **self.key}

        def build() -> dict[str, npt.NDArray]:
            rows = self._encode(paths)
            counts = np.array([rows.num_read, rows.num_cut, rows.num_left_out], np.int64)
            return {**{name: getattr(rows, name) for name in _ARRAYS}, "counts": counts}

        arrays = load_or_build(cache_dir, fields, build, (*_ARRAYS, "counts"))
        num_read, num_cut, _ = arrays.pop("counts").tolist()
        key = cache_key(fields)
        rows = RowTokens(**arrays, num_read=num_read, num_cut=num_cut, key=key)
        return self._not_empty(rows, paths)

    def _encode(self, paths: Sequence[Path]) -> RowTokens:
        return RowTokens.of(
            [
                EncodedRow(row_number(file, row), self.encode_row(row))
                for file, path in enumerate(paths)
                for row in read_rows(path, document=self.document)
            ]
        )

    def _not_empty(self, rows: RowTokens, paths: Sequence[Path]) -> RowTokens:
        if not len(rows):
            names = ", ".join(map(str, paths))
            raise self.empty_error(names, StreamCounts().after(rows))
        return rows


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of each file in a folder."""
    hashes = []
    for file_path in files_of(path):
        with open(file_path, "rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(hashes)
