"""Special tokens of BERT, and the word pieces that continue a word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.tokenizer import FileTokenizer, Tokenizer
from lightning_megatron.errors import UnsupportedError

_CONTINUES = "##"


@dataclass(frozen=True, eq=False)
class WordPieces:
    """Special tokens and continuing pieces of a WordPiece vocabulary.

    Args:
        padding: Id of [PAD].
        start: Id of [CLS].
        separator: Id of [SEP].
        mask: Id of [MASK].
        continues: Mask of the ids whose pieces continue a word, such as "##ing".
    """

    padding: int
    start: int
    separator: int
    mask: int
    continues: npt.NDArray[np.bool_]

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary (tokens)."""
        return len(self.continues)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> WordPieces:
        """Return the special tokens and continuing pieces of a tokenizer.

        Args:
            tokenizer: Tokenizer of the corpus.

        Raises:
            UnsupportedError: If the tokenizer lacks a special token of BERT.
        """
        texts = tokenizer.texts() if isinstance(tokenizer, FileTokenizer) else []
        ids = {text: number for number, text in enumerate(texts) if text is not None}
        needed = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        missing = [token for token in needed if token not in ids]
        if missing:
            raise UnsupportedError(
                f"rows of BERT need the tokens {', '.join(needed)}: the tokenizer "
                f"{tokenizer.name if tokenizer else None!r} lacks {', '.join(missing)}. Use "
                "'bert', 'speeches-wordpiece', or the path of BERT's vocab.txt or tokenizer.json."
            )
        continues = [text is not None and text.startswith(_CONTINUES) for text in texts]
        padding, start, separator, mask = (ids[token] for token in needed)
        return cls(padding, start, separator, mask, np.array(continues))
