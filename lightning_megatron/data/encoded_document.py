"""Token ids of one document, as the sequences of a token file."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.data.sentences import split_sentences
from lightning_megatron.data.tokenizer import Tokenizer


def encode_document(
    text: str, tokenizer: Tokenizer, by_sentence: bool, end: Sequence[int] = ()
) -> list[list[int]]:
    """Return the token ids of each sequence of a document; none for a text without tokens.

    Args:
        text: Text of the document.
        tokenizer: Tokenizer of the token file.
        by_sentence: Whether each sentence is a sequence; otherwise the document is one.
        end: Tokens that follow the last sequence, if there is one.
    """
    texts = split_sentences(text) if by_sentence else [text]
    pieces = [piece for piece in map(tokenizer.encode, texts) if piece]
    if pieces:
        pieces[-1] = [*pieces[-1], *end]
    return pieces
