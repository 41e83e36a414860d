"""Masked-language-model labels for BERT: special tokens, pieces that continue a word, and the
choice and replacement of n-grams of whole words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.building_blocks import IGNORED, Tokenizer
from lightning_megatron.errors import UnsupportedError

_CONTINUES = "##"
Tokens = npt.NDArray[np.int64]
Segment = tuple[int, int]


@dataclass(frozen=True, eq=False)
class WordPieces:
    """Special tokens and continuing pieces of a WordPiece vocabulary.

    Args:
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
        """Return the special tokens and continuing pieces of a tokenizer."""
        texts = [] if tokenizer is None else tokenizer.texts()
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


@dataclass(frozen=True)
class NGramMasking:
    """Masking of n-grams of words; the probability of n words is proportional to 1/n.

    Each word, in random order, starts an n-gram. The n-gram is shortened if it exceeds the end of
    its segment or the number of tokens left to mask, and skipped if it overlaps masked words. Of
    the masked tokens, 80 % become [MASK], 10 % become a random token, and 10 % are unchanged.

    Args:
        probability: Share of the tokens of the segments to mask; at least one token is masked.
        max_ngram: Largest n (words).
        whole_words: Whether all pieces of a word are masked together; otherwise each piece counts
            as a word.

    Source: Megatron-LM core/datasets/masked_dataset.py. Its share includes [CLS] and [SEP], its
    n-grams and words extend across [SEP], and it masks nothing in rows of a very short target
    length.
    """

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True

    def mask(
        self,
        tokens: Tokens,
        segments: Sequence[Segment],
        pieces: WordPieces,
        random: np.random.RandomState,
    ) -> tuple[Tokens, Tokens]:
        """Return the masked tokens, and labels that are -100 except at masked positions.

        Args:
            segments: Start and end position of each segment in the row.
        """
        chosen = self.choose(tokens, segments, pieces, random)
        labels = np.full_like(tokens, IGNORED)
        labels[chosen] = tokens[chosen]
        draws = random.random_sample(len(chosen))
        replacements = random.randint(pieces.vocab_size, size=len(chosen))
        masked = tokens.copy()
        masked[chosen] = np.where(
            draws < 0.8, pieces.mask, np.where(draws < 0.9, replacements, tokens[chosen])
        )
        return masked, labels

    def choose(
        self,
        tokens: Tokens,
        segments: Sequence[Segment],
        pieces: WordPieces,
        random: np.random.RandomState,
    ) -> Tokens:
        """Return the positions of the tokens to predict, in ascending order.

        Args:
            segments: Start and end position of each segment in the row.
        """
        starts, stops, ends = self._words(tokens, segments, pieces)
        num_tokens = sum(stop - start for start, stop in segments)
        left = max(1, round(num_tokens * self.probability))
        weights = 1.0 / np.arange(1, self.max_ngram + 1)
        order = random.permutation(len(starts)).tolist()
        lengths = random.choice(
            self.max_ngram, size=len(starts), p=weights / weights.sum()
        ).tolist()
        is_masked = np.zeros(len(tokens), np.bool_)
        for first in order:
            if not left:
                break
            last = min(first + lengths[first], ends[first] - 1)
            while last >= first and stops[last] - starts[first] > left:
                last -= 1
            if last < first or is_masked[starts[first] : stops[last]].any():
                continue
            is_masked[starts[first] : stops[last]] = True
            left -= stops[last] - starts[first]
        return np.flatnonzero(is_masked)

    def _words(
        self, tokens: Tokens, segments: Sequence[Segment], pieces: WordPieces
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the start and end position of each word, and the first word after its segment."""
        starts: list[int] = []
        stops: list[int] = []
        ends: list[int] = []
        for first, end in segments:
            begins = ~pieces.continues[tokens[first:end]]
            if not self.whole_words:
                begins[:] = True
            # Truncation may have removed the beginning of the first word.
            begins[:1] = True
            positions = (np.flatnonzero(begins) + first).tolist()
            starts += positions
            stops += [*positions[1:], end][: len(positions)]
            ends += [len(starts)] * len(positions)
        return starts, stops, ends
