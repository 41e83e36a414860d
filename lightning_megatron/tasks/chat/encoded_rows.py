"""Tokens of all rows of files, such as conversations, encoded once and cached in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lightning_megatron.building_blocks import (
    EncodedText,
    FileRow,
    RowTokens,
    StreamCounts,
    cache_key,
    files_of,
    load_or_build,
)
from lightning_megatron.errors import CorruptDataError
from lightning_megatron.tasks.chat.chat_template import ChatTokenizer
from lightning_megatron.tasks.chat.conversations import Conversation, conversation_of

TooLong = Literal["cut", "leave_out", "refuse"]
_NAMES = ("tokens", "is_answer", "bounds", "numbers", "counts")


@dataclass(frozen=True)
class ConversationEncoder:
    """Encoder of the rows of files as conversations, with a chat template and a maximum length.

    A subclass reads other rows, with several conversations in each.

    Args:
        seq_length: Tokens that a row predicts; a conversation has at most one more (tokens).
        too_long: Treatment of longer conversations: cut their end, leave them out, or raise an
            error.
    """

    tokenizer: ChatTokenizer
    seq_length: int
    too_long: TooLong

    #: Plural noun for the rows in messages.
    plural: ClassVar[str] = "conversations"
    #: Number of conversations of each row.
    num_texts: ClassVar[int] = 1

    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        """Return the tokens of the conversations of a row; None if it is left out as too long."""
        text = self.encode(conversation_of(row))
        return None if text is None else (text,)

    def encode(self, conversation: Conversation) -> EncodedText | None:
        """Return the tokens of a conversation; None if it is left out as too long."""
        limit = self.seq_length + 1
        encoded = self.tokenizer.encode(conversation)
        ids = encoded[0].astype(np.int32)
        is_answer = encoded[1].astype(np.uint8)
        if len(ids) <= limit:
            return EncodedText(ids, is_answer, False)
        if self.too_long == "refuse":
            raise CorruptDataError(
                f"{conversation.place} has {len(ids)} tokens; at most {limit} (seq_length + 1) fit "
                "into a row. Use a larger seq_length, or too_long='cut' or 'leave_out'."
            )
        if self.too_long == "leave_out" or not is_answer[1:limit].any():
            return None
        return EncodedText(ids[:limit], is_answer[:limit], True)


class EncodedRows:
    """Tokens of all rows of some files. A row has one or several conversations.

    Args:
        cache_dir: Folder of the encoded tokens; None keeps them in memory.
    """

    def __init__(
        self, paths: Sequence[Path], encoder: ConversationEncoder, cache_dir: Path | None
    ) -> None:
        self.names = ", ".join(map(str, paths))
        self.seq_length = encoder.seq_length
        self._plural = encoder.plural
        fields = {
            "files": [_sha256(path) for path in paths],
            "tokenizer": encoder.tokenizer.fingerprint,
            "seq_length": encoder.seq_length,
            "too_long": encoder.too_long,
        }
        if encoder.num_texts > 1:
            fields["num_texts"] = encoder.num_texts
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
            raise no_rows_error(
                self._plural, self.names, self.seq_length, self.num_read, self.num_left_out
            )

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


@dataclass(frozen=True)
class ConversationMessages:
    """Log and error messages about a stream of conversations or pairs of them.

    Args:
        is_packed: Whether samples are packed rows, so that messages say how full they are.
    """

    plural: str
    is_packed: bool = True

    def summary(self, counts: StreamCounts, seq_length: int) -> str:
        """Return how many rows were read, cut and left out."""
        line = (
            f"{counts.num_read} {self.plural} read, {counts.num_cut} cut after {seq_length + 1} "
            f"tokens (seq_length + 1), {counts.num_left_out} left out as too long; "
            f"{counts.num_tokens} tokens, {counts.num_answers} of them in answers"
        )
        return f"{line}, {counts.fill(seq_length)}" if self.is_packed else line

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for files whose rows are all too long."""
        return no_rows_error(self.plural, names, seq_length, counts.num_read, counts.num_left_out)


def no_rows_error(
    plural: str, names: str, seq_length: int, num_read: int, num_left_out: int
) -> CorruptDataError:
    """Return the error for files without any row that is short enough to train on.

    Args:
        seq_length: Tokens that are predicted (tokens).
        num_read: Number of rows that were read (rows).
        num_left_out: Number of rows that were too long (rows).
    """
    return CorruptDataError(
        f"{names} must have a {plural.removesuffix('s')} with an answer in its first "
        f"{seq_length + 1} tokens: {num_read} were read, and {num_left_out} left out as too long. "
        "Use a larger seq_length or other files."
    )


def _encode_all(paths: Sequence[Path], encoder: ConversationEncoder) -> dict[str, npt.NDArray]:
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
