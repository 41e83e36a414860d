"""Tokens of all rows of files, encoded once and cached in a folder."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.chat_template import ChatTokenizer
from lightning_megatron.data.conversation_encoder import (
    ConversationEncoder,
    EncodedText,
    TextTokens,
    TooLong,
)
from lightning_megatron.data.dataset_folders import files_of
from lightning_megatron.data.index_cache import cache_key, load_or_build
from lightning_megatron.errors import CorruptDataError

_NAMES = ("tokens", "is_answer", "bounds", "counts")


class EncodedRows(ABC):
    """Tokens of all rows of some files. A row has one or several conversations.

    Args:
        paths: Files of rows.
        tokenizer: Tokenizer with its chat template.
        seq_length: Tokens that are predicted; a conversation has at most one more (tokens).
        too_long: Treatment of longer conversations: cut their end, leave them out, or raise an
            error.
        cache_dir: Folder of the encoded tokens; None keeps them in memory.

    Raises:
        CorruptDataError: If a row does not have the form that a subclass reads, a conversation is
            too long and ``too_long`` is "refuse", or no row is left.
    """

    #: Plural noun for the rows in messages, such as "conversations".
    plural: str
    #: Number of conversations of each row.
    num_texts = 1

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: ChatTokenizer,
        seq_length: int,
        too_long: TooLong,
        cache_dir: Path | None,
    ) -> None:
        self.names = ", ".join(map(str, paths))
        self.seq_length = seq_length
        fields = {
            "files": [_sha256(path) for path in paths],
            "tokenizer": tokenizer.fingerprint,
            "seq_length": seq_length,
            "too_long": too_long,
        }
        if self.num_texts > 1:
            fields["num_texts"] = self.num_texts
        self.key = cache_key(fields)

        def build() -> dict[str, npt.NDArray]:
            return self._encode_all(paths, ConversationEncoder(tokenizer, seq_length, too_long))

        found = build() if cache_dir is None else load_or_build(cache_dir, fields, build, _NAMES)
        self.tokens = found["tokens"]
        self.is_answer = found["is_answer"]
        #: Index of the first token of each conversation, and the total number of tokens.
        self.bounds = found["bounds"]
        counts = found["counts"].tolist()
        #: Number of rows that were read, cut, and left out.
        self.num_read: int = counts[0]
        self.num_cut: int = counts[1]
        self.num_left_out: int = counts[2]
        if not len(self):
            raise no_rows_error(
                self.plural, self.names, seq_length, self.num_read, self.num_left_out
            )

    def __len__(self) -> int:
        return (len(self.bounds) - 1) // self.num_texts

    @abstractmethod
    def _encode(
        self, path: Path, encoder: ConversationEncoder
    ) -> Iterator[list[EncodedText] | None]:
        """Yield the conversations of each row of a file; None for a row that is left out."""

    def summary(self, seq_length: int) -> str:
        """Return a line with the numbers of rows that were read, cut and left out.

        Args:
            seq_length: Tokens that a row predicts (tokens).
        """
        return (
            f"{self.plural.capitalize()} of {self.names}: {self.num_read} read, {self.num_cut} cut "
            f"after {seq_length + 1} tokens (seq_length + 1), {self.num_left_out} left out as too "
            f"long; {int(self.bounds[-1])} tokens, {int(self.is_answer.sum())} of them in answers."
        )

    def _encode_all(
        self, paths: Sequence[Path], encoder: ConversationEncoder
    ) -> dict[str, npt.NDArray]:
        kept: list[EncodedText] = []
        num_read = 0
        num_cut = 0
        for path in paths:
            for texts in self._encode(path, encoder):
                num_read += 1
                if texts is not None:
                    num_cut += any(text.was_cut for text in texts)
                    kept.extend(texts)
        num_left_out = num_read - len(kept) // self.num_texts
        counts = np.array([num_read, num_cut, num_left_out], np.int64)
        return {**TextTokens.of(kept)._asdict(), "counts": counts}


def no_rows_error(
    plural: str, names: str, seq_length: int, num_read: int, num_left_out: int
) -> CorruptDataError:
    """Return the error for files without any row that is short enough to train on.

    Args:
        plural: Plural noun for the rows.
        names: Names of the files.
        seq_length: Tokens that are predicted (tokens).
        num_read: Number of rows that were read (rows).
        num_left_out: Number of rows that were too long (rows).
    """
    return CorruptDataError(
        f"{names} must have a {plural.removesuffix('s')} with an answer in its first "
        f"{seq_length + 1} tokens: {num_read} were read, and {num_left_out} left out as too long. "
        "Use a larger seq_length or other files."
    )


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of each file in a folder."""
    found = []
    for one in files_of(path):
        with open(one, "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(found)
