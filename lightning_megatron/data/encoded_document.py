"""Token ids of one document, as the sequences of a token file."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.data.sentences import split_sentences
from lightning_megatron.data.tokenizer import Tokenizer


def encode_document(
    text: str, tokenizer: Tokenizer, by_sentence: bool, end: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token ids of each sequence of a document; an empty list for an empty document.

    Args:
        text: Text of the document.
        tokenizer: Tokenizer of the token file.
        by_sentence: Whether each sentence is a sequence; otherwise the document is one sequence.
        end: Tokens to append to the last sequence.
    """
    texts = split_sentences(text) if by_sentence else [text]
    sequences = [tokens for tokens in map(tokenizer.encode, texts) if tokens]
    if sequences:
        sequences[-1] = [*sequences[-1], *end]
    return sequences
