"""Choice of the tokens that a BERT predicts: n-grams of whole words, and what replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.loader import IGNORE_INDEX
from lightning_megatron.data.word_pieces import WordPieces

Tokens = npt.NDArray[np.int64]
Segment = tuple[int, int]


@dataclass(frozen=True)
class NGramMasking:
    """Masking of n-grams of words, of which n has a probability proportional to 1/n.

    Words are taken in a random order. Each begins an n-gram, which is shortened where it passes the
    end of its segment or the number of tokens that are left to mask, and skipped where it touches
    a masked word. Of the masked tokens 80 % become [MASK], 10 % a random token, and 10 % stay.

    Args:
        probability: Share of the tokens of the segments to mask, rounded to a number of at least 1.
        max_ngram: Largest n (words).
        whole_words: Whether a word has all of its pieces; otherwise each piece is one.

    Source: Megatron-LM core/datasets/masked_dataset.py. There, [CLS] and [SEP] count as tokens of
    which a share is masked, n-grams and words reach over [SEP], and rows of a very short target
    length have no mask.
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
        """Return the tokens with masks, and the labels: the true token where one is masked.

        Args:
            tokens: Tokens of a row.
            segments: First token and end of each segment in the row.
            pieces: Facts of the vocabulary.
            random: Source of random numbers.
        """
        chosen = self.choose(tokens, segments, pieces, random)
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[chosen] = tokens[chosen]
        fate = random.random_sample(len(chosen))
        others = random.randint(pieces.vocab_size, size=len(chosen))
        masked = tokens.copy()
        masked[chosen] = np.where(
            fate < 0.8, pieces.mask, np.where(fate < 0.9, others, tokens[chosen])
        )
        return masked, labels

    def choose(
        self,
        tokens: Tokens,
        segments: Sequence[Segment],
        pieces: WordPieces,
        random: np.random.RandomState,
    ) -> Tokens:
        """Return the positions of the tokens to predict, in rising order.

        Args:
            tokens: Tokens of a row.
            segments: First token and end of each segment in the row.
            pieces: Facts of the vocabulary.
            random: Source of random numbers.
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
        """Return first token and end of each word, and the end of its segment (in words)."""
        starts: list[int] = []
        stops: list[int] = []
        ends: list[int] = []
        for first, end in segments:
            begins = ~pieces.continues[tokens[first:end]]
            if not self.whole_words:
                begins[:] = True
            # A cut may have left a piece without the beginning of its word.
            begins[:1] = True
            places = (np.flatnonzero(begins) + first).tolist()
            starts += places
            stops += [*places[1:], end][: len(places)]
            ends += [len(starts)] * len(places)
        return starts, stops, ends
