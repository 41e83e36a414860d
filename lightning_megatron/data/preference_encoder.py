"""Tokenization of preference pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from lightning_megatron.data.conversation_encoder import ConversationEncoder
from lightning_megatron.data.preference_pairs import pair_of
from lightning_megatron.data.row_files import FileRow
from lightning_megatron.data.row_tokens import EncodedText
from lightning_megatron.errors import CorruptDataError


@dataclass(frozen=True)
class PairEncoder(ConversationEncoder):
    """Encoder of the rows of files as preference pairs, the chosen conversation of each pair first.

    A pair is left out if one of its conversations is left out, or if truncation makes both equal.

    Args:
        tokenizer: Tokenizer with its chat template.
        seq_length: Tokens that a conversation predicts; it has at most one more (tokens).
        too_long: Treatment of pairs with a longer conversation: cut its end, leave the pair out, or
            raise an error.
    """

    plural = "pairs"
    num_texts = 2

    @override
    def encode_row(self, row: FileRow) -> tuple[EncodedText, ...] | None:
        pair = pair_of(row)
        chosen = self.encode(pair.chosen)
        rejected = self.encode(pair.rejected)
        if chosen is None or rejected is None:
            return None
        if not np.array_equal(chosen.tokens, rejected.tokens):
            return chosen, rejected
        if chosen.was_cut or rejected.was_cut:
            return None
        raise CorruptDataError(
            f"{row.place}: chosen and rejected must have different tokens, because equal ones "
            f"express no preference: the chat template of {self.tokenizer.folder} makes the same "
            f"{len(chosen.tokens)} tokens of both. Let the template write the content of each "
            "message, or remove the row."
        )
