"""Batches of windows: inputs and labels as tensors, read by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.data.sampler import TokenBatchSampler
from lightning_megatron.data.samples import Samples

IGNORE_INDEX = -100


class WindowBatches(Dataset):
    """Read whole batches: a list of sample numbers gives tokens and labels (B, S), labels already shifted.

    What a short window leaves empty, and rows of number -1, have token 0 and label -100.

    Args:
        samples: Windows of token ids.
        mask_after: Token whose following label is ignored, such as the end of a document; None ignores none.
    """

    def __init__(self, samples: Samples, mask_after: int | None = None) -> None:
        self.samples = samples
        self.mask_after = mask_after

    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        shape = (len(numbers), self.samples.seq_length)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        for row, number in enumerate(numbers):
            if number >= 0:
                window = self.samples[number]
                tokens[row, : len(window) - 1], labels[row, : len(window) - 1] = window[:-1], window[1:]
        if self.mask_after is not None:
            labels[tokens == self.mask_after] = IGNORE_INDEX
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


@dataclass
class TokenLoader:
    """Iterate over the batches of one data-parallel rank.

    It is no DataLoader but makes one per epoch: a trainer leaves its sampler alone, and workers start with the first
    batch, when a checkpoint has been restored, not when the loader is asked for its length.

    Args:
        batches: The data.
        sampler: Which samples, in which order; Lightning calls its `set_epoch`.
        num_workers: Processes that read ahead; 0 reads in this one.
        pin_memory: Put batches into memory from which a GPU copies faster.
    """

    batches: WindowBatches
    sampler: TokenBatchSampler
    num_workers: int = 0
    pin_memory: bool = False
    # batches are made by `sampler`; Lightning looks for this name before it looks there
    batch_sampler: ClassVar[None] = None

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def batch_size(self) -> int:
        """Count the samples of this rank in a full batch."""
        return self.sampler.batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from DataLoader(
            self.batches,
            sampler=self.sampler,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # worker seeds decide nothing here, and must not be drawn from the generator that models use
            generator=torch.Generator().manual_seed(0),
        )

    def state_dict(self) -> dict[str, Any]:
        """Say that training can be resumed; the datamodule's state holds where, for every number of ranks."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Change nothing: the datamodule restores the position."""
