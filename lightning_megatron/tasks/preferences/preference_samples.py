"""Samples and batches of preference pairs, whose labels are the answers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lightning_megatron.building_blocks import (
    IGNORED,
    RowTokens,
    SampleBatches,
    Samples,
    cache_key,
)


class PreferenceSamples(Samples, Protocol):
    """Preference pairs in the order of training."""

    def pair(self, index: int) -> int:
        """Return the number of the pair of a sample, which is that of its row in the files."""

    def text(self, index: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and a mask of those that belong to answers."""


class PairRows:
    """Preference pairs in some order.

    Args:
        order: Index of the pair of each sample.
    """

    def __init__(self, texts: RowTokens, order: npt.NDArray[np.int64]) -> None:
        self._texts = texts
        self._order = order

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
        size = len(encoded) if num_samples is None else num_samples
        passes = range(-(-size // len(encoded)))
        keys = [None if seed is None else [seed, number, 4] for number in passes]
        randoms = [None if key is None else np.random.RandomState(key) for key in keys]
        orders = [shuffled(len(encoded), random) for random in randoms]
        super().__init__(encoded, np.concatenate(orders)[:size])
        self.order_key = cache_key(
            {"pairs": encoded.key, "seed": seed, "is_pass": num_samples is None}
        )


def shuffled(num_pairs: int, random: np.random.RandomState | None) -> npt.NDArray[np.int64]:
    """Return the indices of pairs in the order of a pass.

    Args:
        random: Random number generator that shuffles the pairs; None keeps their order.
    """
    if random is None:
        return np.arange(num_pairs)
    # Two draws, like those of packed rows.
    return random.permutation(num_pairs)[random.permutation(num_pairs)]


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
