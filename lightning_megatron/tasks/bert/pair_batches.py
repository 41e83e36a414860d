"""Batches for pre-training BERT: pairs of segments, their order, and masked tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import IGNORED, SampleBatches
from lightning_megatron.tasks.bert.masking import NGramMasking, WordPieces
from lightning_megatron.tasks.bert.pair_samples import Sentences, SentenceSamples

Tokens = npt.NDArray[np.int64]


class PairBatches(SampleBatches):
    """Batches of masked rows: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] with one segment.

    The division of a sample's sentences into segments, their swap, their truncation and the masks
    depend only on the seed, the epoch and the number of the sample.

    Shapes:
        An item is {"tokens": (B, S), "labels": (B, S), "token_types": (B, S), "valid": (B, S),
        "lengths": (B,), "order": (B,)}. Labels are the original tokens at masked positions, and
        -100 elsewhere. ``valid`` is False at padding, and ``lengths`` is the number of tokens
        before it. ``order`` is 1 if the segments are swapped. A row with number -1 has only [CLS]
        and no label.

    Args:
        num_segments: Segments of a row: 2, or 1 without order prediction.
    """

    samples: SentenceSamples

    def __init__(
        self,
        samples: SentenceSamples,
        pieces: WordPieces,
        masking: NGramMasking,
        num_segments: int,
    ) -> None:
        self.samples = samples
        self.pieces = pieces
        self.masking = masking
        self.num_segments = num_segments

    @override
    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        shape = (len(numbers), self.samples.seq_length)
        tokens = np.full(shape, self.pieces.padding, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
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
            text, bounds, ends = self._joined(segments)
            size = len(text)
            tokens[row, :size], labels[row, :size] = self.masking.mask(
                text, bounds, self.pieces, random
            )
            valid[row, :size] = True
            types[row, ends[0] : size] = 1
        arrays = {"tokens": tokens, "labels": labels, "token_types": types, "valid": valid}
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        lengths = torch.from_numpy(valid.sum(1))
        return {**batch, "lengths": lengths, "order": torch.from_numpy(order)}

    def segments(self, number: int) -> tuple[list[Tokens], int, np.random.RandomState]:
        """Return the segments of a sample.

        Returns:
            Tokens of each segment, 1 if the segments are swapped (otherwise 0), and the random
            number generator from which the masks are drawn next.
        """
        sentences, target = self.samples.sentences(number)
        # RandomState, unlike newer generators, never changes its numbers.
        random = np.random.RandomState(
            [self.samples.seed, self.epoch, number % 2**32, number >> 32, 4]
        )
        if self.num_segments == 1:
            return [_truncated(np.concatenate(sentences), target, random)], 0, random
        pair, is_swapped = _random_segments(sentences, random)
        first, second = _truncated_sizes(len(pair[0]), len(pair[1]), target)
        segments = [_truncated(pair[0], first, random), _truncated(pair[1], second, random)]
        return segments, is_swapped, random

    def _joined(self, segments: list[Tokens]) -> tuple[Tokens, list[tuple[int, int]], list[int]]:
        """Return the tokens of a row, the bounds of each segment, and its end with [SEP]."""
        parts: list[Tokens] = [np.array([self.pieces.start])]
        bounds = []
        ends = []
        start = 1
        for segment in segments:
            parts += [segment, np.array([self.pieces.separator])]
            bounds.append((start, start + len(segment)))
            start += len(segment) + 1
            ends.append(start)
        return np.concatenate(parts), bounds, ends


def _random_segments(
    sentences: Sentences, random: np.random.RandomState
) -> tuple[tuple[Tokens, Tokens], int]:
    """Divide sentences at random; return the segments in the order of the row, and if swapped."""
    pivot = random.randint(1, len(sentences))
    pair = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
    is_swapped = int(random.random_sample() < 0.5)
    return (pair[1], pair[0]) if is_swapped else pair, is_swapped


def _truncated_sizes(first: int, second: int, target: int) -> tuple[int, int]:
    """Return the lengths of two segments after truncation to a total length (tokens).

    Each step removes a token from the longer segment, or from the second one if they are equal.
    """
    if first + second <= target:
        return first, second
    smaller = min(first, second)
    if target - smaller >= smaller:
        return (smaller, target - smaller) if first < second else (target - smaller, smaller)
    return target - target // 2, target // 2


def _truncated(segment: Tokens, size: int, random: np.random.RandomState) -> Tokens:
    """Truncate a segment; each step removes its first or last token with equal probability."""
    start = random.binomial(max(len(segment) - size, 0), 0.5)
    return segment[start : start + size]
