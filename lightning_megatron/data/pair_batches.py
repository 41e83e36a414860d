"""Batches of BERT's rows: two segments, their order, and masks, drawn by the sample's number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.data.loader import IGNORE_INDEX, TokenLoader, WindowBatches
from lightning_megatron.data.masking import NGramMasking
from lightning_megatron.data.pair_samples import Sentences, SentenceSamples
from lightning_megatron.data.word_pieces import WordPieces

Tokens = npt.NDArray[np.int64]


class PairBatches(WindowBatches):
    """Batches of rows [CLS] A [SEP] B [SEP] with masks, or [CLS] A [SEP] without an order.

    Where the sentences of a sample are divided, whether the segments are swapped, what is cut and
    masked depend on the seed, the epoch and the number of the sample alone.

    Shapes:
        An item is {"tokens": (B, S), "labels": (B, S), "token_types": (B, S), "valid": (B, S),
        "order": (B,)}. Labels are the true tokens where one is masked, else -100. ``valid`` is
        false at padding. ``order`` is 1 if the segments are swapped. A row with number -1 has
        [CLS] alone and no label.

    Args:
        samples: Samples of sentences.
        pieces: Facts of the vocabulary.
        masking: Rule of the masks.
        num_segments: Segments of a row: 2, or 1 without an order.
        seed: Seed of all draws.
    """

    def __init__(
        self,
        samples: SentenceSamples,
        pieces: WordPieces,
        masking: NGramMasking,
        num_segments: int,
        seed: int,
    ) -> None:
        super().__init__(samples)
        self.pieces = pieces
        self.masking = masking
        self.num_segments = num_segments
        self.seed = seed
        #: Number of the pass over the samples; each has other masks.
        self.epoch = 0
        self._sentence_samples = samples

    @override
    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        shape = (len(numbers), self.samples.seq_length)
        tokens = np.full(shape, self.pieces.padding, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        types = np.zeros(shape, np.int64)
        valid = np.zeros(shape, np.bool_)
        order = np.zeros(len(numbers), np.int64)
        # Attention needs a valid token in each row.
        tokens[:, 0] = self.pieces.start
        valid[:, 0] = True
        for row, number in enumerate(numbers):
            if number < 0:
                continue
            segments, order[row], random = self.segments(number)
            text, places, ends = self._joined(segments)
            size = len(text)
            tokens[row, :size], labels[row, :size] = self.masking.mask(
                text, places, self.pieces, random
            )
            valid[row, :size] = True
            types[row, ends[0] : size] = 1
        arrays = {"tokens": tokens, "labels": labels, "token_types": types, "valid": valid}
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {**batch, "order": torch.from_numpy(order)}

    def segments(self, number: int) -> tuple[list[Tokens], int, np.random.RandomState]:
        """Return the segments of a sample, whether they are swapped, and the source of its masks.

        Args:
            number: Number of the sample.
        """
        sentences, target = self._sentence_samples.sentences(number)
        # RandomState, unlike newer generators, never changes its numbers.
        random = np.random.RandomState([self.seed, self.epoch, number % 2**32, number >> 32, 4])
        if self.num_segments == 1:
            return [_cut(np.concatenate(sentences), target, random)], 0, random
        pair, is_swapped = _divided(sentences, random)
        first, second = _cut_sizes(len(pair[0]), len(pair[1]), target)
        return [_cut(pair[0], first, random), _cut(pair[1], second, random)], is_swapped, random

    def _joined(self, segments: list[Tokens]) -> tuple[Tokens, list[tuple[int, int]], list[int]]:
        """Return the tokens of a row, where each segment lies, and where each ends with [SEP]."""
        parts: list[Tokens] = [np.array([self.pieces.start])]
        places = []
        ends = []
        start = 1
        for segment in segments:
            parts += [segment, np.array([self.pieces.separator])]
            places.append((start, start + len(segment)))
            start += len(segment) + 1
            ends.append(start)
        return np.concatenate(parts), places, ends


class PairLoader(TokenLoader):
    """Loader whose batches have other masks in each epoch of training."""

    @override
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        assert isinstance(self.batches, PairBatches), "such a loader has batches of pairs"
        # Without a seed the sampler repeats an epoch, as it does for validation.
        self.batches.epoch = 0 if self.sampler.seed is None else self.sampler.epoch
        yield from super().__iter__()


def _divided(
    sentences: Sentences, random: np.random.RandomState
) -> tuple[tuple[Tokens, Tokens], int]:
    """Return two segments in the order of the row, and whether they are swapped."""
    pivot = random.randint(1, len(sentences))
    pair = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
    is_swapped = int(random.random_sample() < 0.5)
    return (pair[1], pair[0]) if is_swapped else pair, is_swapped


def _cut_sizes(first: int, second: int, target: int) -> tuple[int, int]:
    """Return what is left of two lengths if tokens of the longer one are cut, one by one (tokens).

    Of equal lengths the second is cut.
    """
    if first + second <= target:
        return first, second
    smaller = min(first, second)
    if target - smaller >= smaller:
        return (smaller, target - smaller) if first < second else (target - smaller, smaller)
    return target - target // 2, target // 2


def _cut(segment: Tokens, size: int, random: np.random.RandomState) -> Tokens:
    """Return a part of a segment: each token that is cut is its first or last with equal chance."""
    start = random.binomial(max(len(segment) - size, 0), 0.5)
    return segment[start : start + size]
