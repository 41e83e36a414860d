"""Tokens of all rows of files, encoded once and kept in a folder, with an account of truncation."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.chat_template import ChatTokenizer
from lightning_megatron.data.conversations import Conversation
from lightning_megatron.data.dataset_folders import files_of
from lightning_megatron.data.index_cache import cache_key, load_or_build
from lightning_megatron.errors import CorruptDataError

TooLong = Literal["cut", "leave_out", "refuse"]
_NAMES = ("tokens", "is_answer", "bounds", "counts")


class EncodedText(NamedTuple):
    """Tokens of a conversation, as many as a row has room for.

    Args:
        tokens: Token ids.
        is_answer: Whether each of them belongs to an answer.
        was_cut: Whether its end was cut off.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    was_cut: bool


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
        self.too_long = too_long
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
            return self._joined(paths, tokenizer)

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
            one = self.plural.removesuffix("s")
            raise CorruptDataError(
                f"{self.names} must have a {one} with an answer in its first "
                f"{seq_length + 1} tokens: {self.num_read} were read, and {self.num_left_out} left "
                "out as too long. Use a larger seq_length or other files."
            )

    def __len__(self) -> int:
        return (len(self.bounds) - 1) // self.num_texts

    @abstractmethod
    def _encode(self, path: Path, tokenizer: ChatTokenizer) -> Iterator[list[EncodedText] | None]:
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

    def fitted(self, conversation: Conversation, tokenizer: ChatTokenizer) -> EncodedText | None:
        """Return the tokens of a conversation; None if it is left out as too long.

        Args:
            conversation: Messages.
            tokenizer: Tokenizer with its chat template.

        Raises:
            CorruptDataError: If it is too long and that is to be refused.
        """
        most = self.seq_length + 1
        ids, is_answer = tokenizer.encode(conversation)
        if len(ids) <= most:
            return EncodedText(ids, is_answer, False)
        if self.too_long == "refuse":
            raise CorruptDataError(
                f"{conversation.place} has {len(ids)} tokens; a row has room for {most} "
                "(seq_length + 1). Use a larger seq_length, or too_long='cut' or 'leave_out'."
            )
        if self.too_long == "leave_out" or not is_answer[1:most].any():
            return None
        return EncodedText(ids[:most], is_answer[:most], True)

    def _joined(self, paths: Sequence[Path], tokenizer: ChatTokenizer) -> dict[str, npt.NDArray]:
        tokens: list[npt.NDArray] = [np.zeros(0, np.int32)]
        answers: list[npt.NDArray] = [np.zeros(0, np.uint8)]
        num_read = 0
        num_cut = 0
        for path in paths:
            for texts in self._encode(path, tokenizer):
                num_read += 1
                if texts is None:
                    continue
                num_cut += any(text.was_cut for text in texts)
                tokens.extend(text.tokens.astype(np.int32) for text in texts)
                answers.extend(text.is_answer.astype(np.uint8) for text in texts)
        num_left_out = num_read - (len(tokens) - 1) // self.num_texts
        return {
            "tokens": np.concatenate(tokens),
            "is_answer": np.concatenate(answers),
            "bounds": np.cumsum([len(one) for one in tokens], dtype=np.int64),
            "counts": np.array([num_read, num_cut, num_left_out], np.int64),
        }


def _sha256(path: Path) -> str:
    """Return the digest of a file, or those of the files in a folder."""
    found = []
    for one in files_of(path):
        with open(one, "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return " ".join(found)
