"""Batches of token windows as tensors, and the loaders of samples and of streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.samples import Samples, Windows
from lightning_megatron.data.streamed_samples import StreamedSamples

IGNORE_INDEX = -100


class SampleBatches(Dataset):
    """Dataset whose items are whole batches, indexed by a list of sample numbers.

    The number -1 means a padding sample without labels.
    """

    #: Samples in order.
    samples: Samples
    #: Number of the pass over the samples, for batches that differ in each pass.
    epoch = 0


class WindowBatches(SampleBatches):
    """Dataset whose items are whole batches, indexed by a list of sample numbers.

    Shapes:
        An item is {"tokens": (B, S), "labels": (B, S)} with labels that are shifted by one token.
        The padding of a short window and whole rows with number -1 have token 0 and label -100.
        Separate documents add {"lengths": (B, L)}: the number of tokens of each document of a row,
        followed by zeros. L is the same for all batches.

    Args:
        samples: Windows of token ids.
        mask_after: Token whose label, the token after it, the loss ignores, such as the
            end-of-document token; None ignores no label.
        are_separate: Whether documents are separate. Batches then have their lengths, and the loss
            ignores the label of the last token of each document, which belongs to the next one.
    """

    samples: Windows

    def __init__(
        self, samples: Windows, mask_after: int | None = None, are_separate: bool = False
    ) -> None:
        self.samples = samples
        self.mask_after = mask_after
        self.are_separate = are_separate

    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        shape = (len(numbers), self.samples.seq_length)
        tokens = np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        for row, number in enumerate(numbers):
            if number >= 0:
                window = self.samples[number]
                tokens[row, : len(window) - 1] = window[:-1]
                labels[row, : len(window) - 1] = window[1:]
        if self.mask_after is not None:
            labels[tokens == self.mask_after] = IGNORE_INDEX
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self.are_separate:
            batch["lengths"] = torch.from_numpy(self._lengths(numbers, labels))
        return batch

    def _lengths(self, numbers: list[int], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the document lengths of each row, and set labels across document ends to -100."""
        lengths = np.zeros((len(numbers), self.samples.max_documents), np.int64)
        for row, number in enumerate(numbers):
            if number < 0:
                continue
            sizes = self.samples.lengths(number)
            labels[row, np.cumsum(sizes)[:-1] - 1] = IGNORE_INDEX
            # The last token of a window is only a label.
            sizes[-1] -= 1
            lengths[row, : len(sizes)] = sizes
        return lengths


@dataclass
class TokenLoader:
    """Iterable over the batches of one data-parallel rank.

    This process builds the batches of a stream itself, whose worker processes encode rows. For
    other samples it creates a DataLoader for each epoch instead of being one, for two reasons:
    Lightning then does not replace the sampler, and workers start at the first batch, after a
    checkpoint has been restored.

    Args:
        batches: Dataset of batches.
        sampler: Order of the samples; Lightning calls its ``set_epoch``.
        num_workers: Worker processes that prefetch batches; 0 loads them in this process.
        pin_memory: Whether to pin batches in memory, from which a GPU copies faster.
    """

    batches: SampleBatches
    sampler: TokenBatchSampler
    num_workers: int = 0
    pin_memory: bool = False
    # Lightning looks for `batch_sampler` first, and for `sampler` only if it is None.
    batch_sampler: ClassVar[None] = None

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def batch_size(self) -> int:
        """Number of samples of this rank in a full batch."""
        return self.sampler.batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # A sampler without a seed, such as that of validation, repeats the same epoch.
        self.batches.epoch = 0 if self.sampler.seed is None else self.sampler.epoch
        samples = self.batches.samples
        if isinstance(samples, StreamedSamples):
            yield from self._read(samples)
            return
        yield from DataLoader(
            self.batches,
            sampler=self.sampler,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # Workers draw no random numbers, but without this generator DataLoader would draw their
            # seed from the default generator, which models use.
            generator=torch.Generator().manual_seed(0),
        )

    def _read(self, samples: StreamedSamples) -> Iterator[dict[str, torch.Tensor]]:
        try:
            for numbers in self.sampler:
                batch = self.batches[numbers]
                samples.free_before(min(numbers))
                if self.pin_memory:
                    batch = {name: values.pin_memory() for name, values in batch.items()}
                yield batch
        finally:
            # A training goes on with the next pass.
            if not self.sampler.drop_last:
                samples.close()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the data module saves the position.

        Lightning requires this method of a loader that can resume within an epoch.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the data module restores the position."""


#: Number of samples of an endless stream.
_ENDLESS = 2**62


class PassSampler(TokenBatchSampler):
    """Batches of a stream for one data-parallel rank, with an epoch for each pass over its files.

    The global batches are the same as in a run without epochs. An epoch ends before the first
    global batch with samples of the next pass; the remaining samples of its pass are the first ones
    of the next epoch. With ``drop_last=False`` there is only the first pass, whose last batch has
    the remaining samples. The number of batches is unknown.
    """

    def __init__(
        self, samples: StreamedSamples, batch_size: int, dp_rank: int, dp_size: int, **options: Any
    ) -> None:
        self._samples = samples
        super().__init__(_ENDLESS, batch_size, dp_rank, dp_size, **options)

    def __len__(self) -> int:
        raise TypeError("the number of batches of a pass over a stream is unknown")

    @override
    def _batch_ranges(self, count: int) -> Iterator[tuple[int, int]]:
        current = None if self.drop_last else 0
        for start, size in super()._batch_ranges(count):
            last = start + size - 1
            if current is None:
                current = self._samples.pass_of(last)
            elif not self._samples.is_in_pass(last, current):
                numbers = range(start, start + size)
                num_left = sum(self._samples.is_in_pass(number, current) for number in numbers)
                if num_left and not self.drop_last:
                    yield start, num_left
                return
            yield start, size
