"""Sampler and loader of a stream, whose epochs are passes over its files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from lightning_megatron.data.loader import TokenLoader
from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.streamed_samples import StreamedSamples

#: Number of samples of an endless stream.
_ENDLESS = 2**62


class PassSampler(TokenBatchSampler):
    """Batches of a stream for one data-parallel rank, with an epoch for each pass over its files.

    The global batches are the same as in a run without epochs. An epoch ends before the first
    global batch with samples of the next pass; the remaining samples of its pass are the first ones
    of the next epoch. The number of batches is unknown.
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
        current = None
        for start, size in super()._batch_ranges(count):
            last = start + size - 1
            if current is None:
                current = self._samples.pass_of(last)
            elif not self._samples.is_in_pass(last, current):
                return
            yield start, size


class StreamLoader(TokenLoader):
    """Iterable over the batches of a stream for one data-parallel rank.

    This process builds the batches itself; the worker processes encode rows.
    """

    @override
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        samples = self.batches.samples
        assert isinstance(samples, StreamedSamples), "only a stream has this loader"
        for numbers in self.sampler:
            batch = self.batches[numbers]
            samples.free_before(min(numbers))
            if self.pin_memory:
                batch = {name: values.pin_memory() for name, values in batch.items()}
            yield batch
