"""Tokenization of conversations, up to the number of tokens that fit into a row."""

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
    """Tokens of a conversation, at most as many as fit into a row.

    Args:
        tokens: Token ids.
        is_answer: 1 for tokens of answers, 0 for other tokens.
        was_cut: Whether the end of the conversation was cut off.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    was_cut: bool


class TextTokens(NamedTuple):
    """Concatenated tokens of several conversations.

    Args:
        tokens: Token ids.
        is_answer: 1 for tokens of answers, 0 for other tokens.
        bounds: Index of the first token of each conversation, and the total number of tokens.
    """

    tokens: npt.NDArray
    is_answer: npt.NDArray
    bounds: npt.NDArray

    @classmethod
    def of(cls, texts: Sequence[EncodedText]) -> TextTokens:
        """Concatenate conversations.

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
    """Encoder of conversations with a chat template and a maximum length.

    Args:
        tokenizer: Tokenizer with its chat template.
        seq_length: Tokens that a row predicts; a conversation has at most one more (tokens).
        too_long: Treatment of longer conversations: cut their end, leave them out, or raise an
            error.
    """

    tokenizer: ChatTokenizer
    seq_length: int
    too_long: TooLong

    def encode_row(self, row: FileRow) -> EncodedText | None:
        """Return the tokens of the conversation of a row; None if it is left out as too long.

        Args:
            row: Row of a file.

        Raises:
            CorruptDataError: If the row is not a conversation, and as for :meth:`encode`.
        """
        return self.encode(conversation_of(row))

    def encode(self, conversation: Conversation) -> EncodedText | None:
        """Return the tokens of a conversation; None if it is left out as too long.

        Args:
            conversation: Messages of a row.

        Raises:
            CorruptDataError: If the conversation is too long and ``too_long`` is "refuse", and as
                for :meth:`ChatTokenizer.encode`.
        """
        limit = self.seq_length + 1
        found = self.tokenizer.encode(conversation)
        ids = found[0].astype(np.int32)
        is_answer = found[1].astype(np.uint8)
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
