"""Tokens of conversations that a row has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.chat_template import ChatTokenizer
from lightning_megatron.data.conversations import Conversation, conversation_of
from lightning_megatron.data.row_files import FileRow
from lightning_megatron.errors import CorruptDataError

TooLong = Literal["cut", "leave_out", "refuse"]


class EncodedText(NamedTuple):
    """Tokens of a conversation, as many as a row has room for.

    Args:
        tokens: Token ids.
        is_answer: 1 for those of answers, 0 for others.
        was_cut: Whether its end was cut off.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    was_cut: bool


class TextTokens(NamedTuple):
    """Tokens of several conversations, one after the other.

    Args:
        tokens: Token ids.
        is_answer: 1 for those of answers, 0 for others.
        bounds: First token of each conversation, and the end of the last one.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    bounds: npt.NDArray

    @classmethod
    def of(cls, texts: Sequence[EncodedText]) -> TextTokens:
        """Join conversations.

        Args:
            texts: Conversations.
        """
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(text.tokens for text in texts)]),
            np.concatenate([np.zeros(0, np.uint8), *(text.is_answer for text in texts)]),
            np.cumsum([0, *(len(text.tokens) for text in texts)], dtype=np.int64),
        )


@dataclass(frozen=True)
class ConversationEncoder:
    """Tokens of conversations by a chat template, with one rule for those that are too long.

    Args:
        tokenizer: Tokenizer with its chat template.
        seq_length: Tokens that are predicted; a conversation has at most one more (tokens).
        too_long: What is done with longer ones: cut their end, leave them out, or refuse them.
    """

    tokenizer: ChatTokenizer
    seq_length: int
    too_long: TooLong

    def encode_row(self, row: FileRow) -> EncodedText | None:
        """Return the tokens of the conversation of a row; None if it is left out as too long.

        Args:
            row: Row of a file.

        Raises:
            CorruptDataError: If it is no conversation, or as :meth:`encode`.
        """
        return self.encode(conversation_of(row))

    def encode(self, conversation: Conversation) -> EncodedText | None:
        """Return the tokens of a conversation; None if it is left out as too long.

        Args:
            conversation: Messages.

        Raises:
            CorruptDataError: If it is too long and that is to be refused.
        """
        most = self.seq_length + 1
        found = self.tokenizer.encode(conversation)
        ids = found[0].astype(np.int32)
        is_answer = found[1].astype(np.uint8)
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
