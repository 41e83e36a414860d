"""Tokenization of conversations, up to the number of tokens that fit into a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lightning_megatron.data.chat_template import ChatTokenizer
from lightning_megatron.data.conversations import Conversation, conversation_of
from lightning_megatron.data.row_files import FileRow
from lightning_megatron.data.row_tokens import EncodedText
from lightning_megatron.errors import CorruptDataError

TooLong = Literal["cut", "leave_out", "refuse"]


@dataclass(frozen=True)
class ConversationEncoder:
    """Encoder of the rows of files as conversations, with a chat template and a maximum length.

    A subclass reads other rows, with several conversations in each.

    Args:
        tokenizer: Tokenizer with its chat template.
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
        """Return the tokens of the conversations of a row; None if it is left out as too long.

        Args:
            row: Row of a file.

        Raises:
            CorruptDataError: If the row has another form, and as for :meth:`encode`.
        """
        text = self.encode(conversation_of(row))
        return None if text is None else (text,)

    def encode(self, conversation: Conversation) -> EncodedText | None:
        """Return the tokens of a conversation; None if it is left out as too long.

        Args:
            conversation: Messages of a row.

        Raises:
            CorruptDataError: If the conversation is too long and ``too_long`` is "refuse", and as
                for :meth:`ChatTokenizer.encode`.
        """
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
