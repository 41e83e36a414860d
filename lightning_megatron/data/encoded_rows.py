"""Tokens of all rows of files, encoded once and kept in a folder, with an account of truncation."""

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
    """Tokens of all rows of some files; a row has one conversation or several of them.

    Args:
        paths: Files of rows.
        tokenizer: Tokenizer with its chat template.
        seq_length: Tokens that are predicted; a conversation has at most one more (tokens).
        too_long: What is done with longer ones: cut their end, leave them out, or refuse them.
        cache_dir: Folder of the encoded tokens; None keeps them in memory.

    Raises:
        CorruptDataError: If a row is not of the form that a subclass reads, one is too long and
            that is to be refused, or none is left.
    """

    #: What a row is, in words.
    plural: str
    #: Conversations of each row.
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
            return self._joined(paths, ConversationEncoder(tokenizer, seq_length, too_long))

        found = build() if cache_dir is None else load_or_build(cache_dir, fields, build, _NAMES)
        self.tokens = found["tokens"]
        self.is_answer = found["is_answer"]
        #: First token of each conversation, and the end of the last one.
        self.bounds = found["bounds"]
        counts = found["counts"].tolist()
        #: Rows that were read, lost an end, and were left out.
        self.num_read: int = counts[0]
        self.num_cut: int = counts[1]
        self.num_left_out: int = counts[2]
        if not len(self):
            raise no_text_error(
                self.plural, self.names, seq_length, self.num_read, self.num_left_out
            )

    def __len__(self) -> int:
        return (len(self.bounds) - 1) // self.num_texts

    @abstractmethod
    def _encode(
        self, path: Path, encoder: ConversationEncoder
    ) -> Iterator[list[EncodedText] | None]:
        """Yield the conversations of each row of a file; None for a row that is left out."""

    def line(self, seq_length: int) -> str:
        """Return a line about what was read, and what truncation took.

        Args:
            seq_length: Tokens that a row predicts (tokens).
        """
        return (
            f"{self.plural.capitalize()} of {self.names}: {self.num_read} read, {self.num_cut} cut "
            f"after {seq_length + 1} tokens (seq_length + 1), {self.num_left_out} left out as too "
            f"long; {int(self.bounds[-1])} tokens, {int(self.is_answer.sum())} of them in answers."
        )

    def _joined(
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


def no_text_error(
    plural: str, names: str, seq_length: int, num_read: int, num_left_out: int
) -> CorruptDataError:
    """Return the error of files that leave nothing to train on.

    Args:
        plural: What a row is, in words.
        names: Files.
        seq_length: Tokens that are predicted (tokens).
        num_read: Rows that were read (rows).
        num_left_out: Rows that were too long (rows).
    """
    return CorruptDataError(
        f"{names} must have a {plural.removesuffix('s')} with an answer in its first "
        f"{seq_length + 1} tokens: {num_read} were read, and {num_left_out} left out as too long. "
        "Use a larger seq_length or other files."
    )


def _sha256(path: Path) -> str:
    """Return the digest of a file, or those of the files in a folder."""
    found = []
    for one in files_of(path):
        with open(one, "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(found)
