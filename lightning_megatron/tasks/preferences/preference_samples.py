"""Samples and batches of preference pairs, whose labels are the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import (
    IGNORED,
    PackedIndex,
    RowTokens,
    SampleBatches,
    Samples,
    StreamedSamples,
    StreamLoader,
    TokenBatchSampler,
    cache_key,
    index_packed,
)

#: Number of samples of an endless stream.
_ENDLESS = 2**62


class PreferenceSamples(Samples, Protocol):
    """Preference pairs in the order of training."""

    def pair(self, index: int) -> int:
        """Return the number of the pair of a sample, which is that of its row in the files."""

    def text(self, index: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and a mask of those that belong to answers."""


class PairRows:
    """Preference pairs in some order; each pair is a window of two documents.

    Args:
        index: Index of the pair of each sample, as its only piece.
    """

    def __init__(self, texts: RowTokens, index: PackedIndex) -> None:
        self._texts = texts
        self._order = index.parts[:, 0]

    def __len__(self) -> int:
        return len(self._order)

    def pair(self, index: int) -> int:
        """Return the number of the pair of a sample, which is that of its row in the files."""
        return int(self._texts.numbers[self._order[index]])

    def text(self, index: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and a mask of those that belong to answers."""
        first = 2 * int(self._order[index]) + side
        start, stop = self._texts.bounds[first : first + 2]
        tokens = self._texts.tokens[start:stop].astype(np.int64)
        return tokens, self._texts.is_answer[start:stop].astype(np.bool_)


class PairSamples(PairRows):
    """Preference pairs of some files in shuffled order.

    Args:
        seed: Seed of the shuffle; None keeps the order of the files.
        num_samples: Number of pairs, over as many passes as needed; None makes one pass (pairs).
    """

    def __init__(
        self,
        encoded: RowTokens,
        seq_length: int,
        seed: int | None,
        num_samples: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        super().__init__(
            encoded, index_packed(one_row_each(len(encoded)), 1, num_samples, seed, is_packed=False)
        )
        self.order_key = cache_key(
            {"pairs": encoded.key, "seed": seed, "is_pass": num_samples is None}
        )


def one_row_each(num_pairs: int) -> npt.NDArray[np.int64]:
    """Return the lengths of documents that represent pairs in an index, each in its own row.

    A document of two tokens fills a row that predicts one token (tokens).
    """
    return np.full(num_pairs, 2)


class PairBatches(SampleBatches):
    """Dataset whose items are whole batches of pairs, indexed by a list of sample numbers.

    Shapes:
        An item is {"tokens": (B, 2, S), "labels": (B, 2, S), "pairs": (B,)}. The chosen
        conversation of each pair comes first. Labels are shifted by one token, and -100 where the
        next token does not belong to an answer. ``pairs`` is the number of each pair, see
        ``PreferenceDataModule``. Padding has token 0 and label -100. A sample with number -1 is
        only padding, and the number of its pair is -1.

    Args:
        multiple: S is the length of the longest conversation of the batch, rounded up to a multiple
            of this number and at most ``seq_length``; None means ``seq_length`` (tokens).
    """

    samples: PreferenceSamples

    def __init__(self, samples: PreferenceSamples, multiple: int | None) -> None:
        self.samples = samples
        self.multiple = multiple

    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        pairs = [-1 if number < 0 else self.samples.pair(number) for number in numbers]
        texts = {
            (row, side): self.samples.text(number, side)
            for row, number in enumerate(numbers)
            for side in (0, 1)
            if number >= 0
        }
        length = self.samples.seq_length
        if self.multiple is not None:
            longest = max((len(tokens) - 1 for tokens, _ in texts.values()), default=1)
            length = min(length, -(-longest // self.multiple) * self.multiple)
        tokens = np.zeros((len(pairs), 2, length), np.int64)
        labels = np.full(tokens.shape, IGNORED, np.int64)
        for index, (ids, is_answer) in texts.items():
            tokens[index][: len(ids) - 1] = ids[:-1]
            labels[index][: len(ids) - 1] = np.where(is_answer[1:], ids[1:], IGNORED)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "pairs": torch.tensor(pairs),
        }


class OnePassSampler(TokenBatchSampler):
    """Batches of the first pass over a stream for one data-parallel rank.

    The samples of a last global batch that is not full are divided evenly, and ranks with one
    sample less get the number -1. The number of batches is unknown.

    Args:
        samples: Samples of the stream.
    """

    def __init__(
        self, samples: StreamedSamples, batch_size: int, dp_rank: int, dp_size: int
    ) -> None:
        self._samples = samples
        super().__init__(_ENDLESS, batch_size, dp_rank, dp_size, drop_last=False)

    def __len__(self) -> int:
        raise TypeError("the number of batches of a pass over a stream is unknown")

    @override
    def _batch_ranges(self, count: int) -> Iterator[tuple[int, int]]:
        for start, size in super()._batch_ranges(count):
            numbers = range(start, start + size)
            num_left = sum(self._samples.is_in_pass(number, 0) for number in numbers)
            if num_left:
                yield start, num_left
            if num_left < size:
                return


class OnePassLoader(StreamLoader):
    """Iterable over a pass of a stream for one data-parallel rank, which then stops reading."""

    @override
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        samples = self.batches.samples
        assert isinstance(samples, StreamedSamples), "only a stream has this loader"
        try:
            yield from super().__iter__()
        finally:
            samples.close()
