"""Tokens of all rows of files, such as conversations, encoded once and cached in a folder."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.index_cache import cache_key, load_or_build
from lightning_megatron.data.row_files import FileRow, files_of
from lightning_megatron.data.row_tokens import EncodedText, RowTokens
from lightning_megatron.data.streaming import RowMessages, StreamCounts

_NAMES = ("tokens", "is_answer", "bounds", "numbers", "counts")


class RowEncoder(ABC):
    """Encoder of the rows of files, which worker processes unpickle."""

    #: Plural noun for the rows in messages.
    plural: ClassVar[str]
    #: Tokens that a row predicts (tokens).
    seq_length: int

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
    def messages(self, is_packed: bool = True) -> RowMessages:
        """Return log and error messages about rows.

        Args:
            is_packed: Whether samples are packed rows, so that messages say how full they are.
        """


class EncodedRows:
    """Tokens of all rows of some files. A row has one or several conversations.

    Args:
        cache_dir: Folder of the encoded tokens; None keeps them in memory.
    """

    def __init__(self, paths: Sequence[Path], encoder: RowEncoder, cache_dir: Path | None) -> None:
        self.names = ", ".join(map(str, paths))
        self.seq_length = encoder.seq_length
        self._plural = encoder.plural
        fields = {"files": [_sha256(path) for path in paths], **encoder.key}
        self.key = cache_key(fields)

        def build() -> dict[str, npt.NDArray]:
            return _encode_all(paths, encoder)

        arrays = build() if cache_dir is None else load_or_build(cache_dir, fields, build, _NAMES)
        self.tokens = arrays["tokens"]
        self.is_answer = arrays["is_answer"]
        #: Index of the first token of each conversation, and the total number of tokens.
        self.bounds = arrays["bounds"]
        #: Number of each row that was not left out.
        self.numbers = arrays["numbers"]
        counts = arrays["counts"].tolist()
        #: Number of rows that were read, cut, and left out.
        self.num_read: int = counts[0]
        self.num_cut: int = counts[1]
        self.num_left_out: int = counts[2]
        if not len(self):
            counted = StreamCounts(self.num_read, self.num_cut, self.num_left_out)
            raise encoder.messages().empty_error(self.names, counted, self.seq_length)

    def __len__(self) -> int:
        return len(self.numbers)

    def summary(self) -> str:
        """Return a line with the numbers of rows that were read, cut and left out."""
        return (
            f"{self._plural.capitalize()} of {self.names}: {self.num_read} read, {self.num_cut} "
            f"cut after {self.seq_length + 1} tokens (seq_length + 1), {self.num_left_out} left "
            f"out as too long; {int(self.bounds[-1])} tokens, {int(self.is_answer.sum())} of them "
            "in answers."
        )


def _encode_all(paths: Sequence[Path], encoder: RowEncoder) -> dict[str, npt.NDArray]:
    """Return the tokens of all rows of files, and the numbers of rows read, cut and left out."""
    rows = RowTokens.of_files(paths, encoder.encode_row)
    counts = np.array([rows.num_read, rows.num_cut, rows.num_left_out], np.int64)
    return {
        "tokens": rows.tokens,
        "is_answer": rows.is_answer,
        "bounds": rows.bounds,
        "numbers": rows.numbers,
        "counts": counts,
    }


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of each file in a folder."""
    hashes = []
    for file_path in files_of(path):
        with open(file_path, "rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(hashes)
