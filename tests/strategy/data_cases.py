"""Ways to give data to a Trainer, and fits that record the samples of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)


class Numbers(Dataset):
    """Data set of consecutive numbers."""

    def __init__(self, size: int = 16, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.first + index))


class NumberStream(IterableDataset):
    """Stream of numbers without a length."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor(float(number)) for number in range(self.size))


class SizedNumberStream(NumberStream):
    def __len__(self) -> int:
        return self.size


class ReversedSampler(Sampler):
    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


class GrowingBatches(BatchSampler):
    """Give batches of one, two, three and more samples."""

    def __iter__(self) -> Iterator[list[int]]:
        indices, size = list(self.sampler), 1
        while len(indices) >= size:
            yield indices[:size]
            indices, size = indices[size:], size + 1

    def __len__(self) -> int:
        left, size = len(list(self.sampler)), 1
        while left >= size:
            left, size = left - size, size + 1
        return size - 1


class RecordsSamples(LightningModule):
    """Record the samples of every step, and train a number towards them.

    Args:
        skips: Whether a step returns None for some batches.
    """

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[Any] = []
        self.skips, self.checked = skips, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.seen.append((batch_idx, as_lists(batch), self.trainer.accumulate_grad_batches))
        if self.skips and batch_idx % 2:
            return None
        tensors = list(tensors_of(batch))
        return torch.stack([((self.weight - tensor / 10) ** 2).mean() for tensor in tensors]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.checked.append((dataloader_idx, batch_idx, as_lists(batch)))
        self.log("checked", batch.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.05)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_of(value)
    elif batch is not None:
        for value in batch:
            yield from tensors_of(value)


def as_lists(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: as_lists(value) for name, value in batch.items()}
    return (
        batch
        if batch is None or isinstance(batch, (int, float))
        else [as_lists(value) for value in batch]
    )


class NumbersModule(LightningDataModule):
    def train_dataloader(self) -> Any:
        return {"a": DataLoader(Numbers(), 4), "b": DataLoader(Numbers(16, 100), 2)}

    def val_dataloader(self) -> Any:
        return [DataLoader(Numbers(6), 4), DataLoader(Numbers(4, 50), 2)]


def make_loader(size: int = 16, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Numbers(size), batch_size, **options)


def weighted() -> Sampler:
    return WeightedRandomSampler([1.0, 5.0] * 8, 12, generator=torch.Generator().manual_seed(3))


def with_replacement(seed: int = 5) -> Sampler:
    return RandomSampler(
        Numbers(),
        replacement=True,
        num_samples=20,
        generator=torch.Generator().manual_seed(seed),
    )


def combined(mode: str) -> Callable[[], CombinedLoader]:
    return lambda: CombinedLoader({"long": make_loader(16), "short": make_loader(8, 2)}, mode)


#: Function that makes the data, and options of the Trainer.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "in order": (make_loader, {}),
    "a smaller last batch": (lambda: make_loader(14), {}),
    "drop_last": (lambda: make_loader(14, drop_last=True), {}),
    "shuffled by a generator": (lambda: make_loader(shuffle=True, generator=torch.Generator().manual_seed(7)), {}),
    "a sampler": (lambda: make_loader(sampler=ReversedSampler()), {}),
    "a weighted sampler": (lambda: make_loader(sampler=weighted()), {}),
    "with replacement": (lambda: make_loader(sampler=with_replacement()), {}),
    "batches that grow": (
        lambda: DataLoader(Numbers(), batch_sampler=GrowingBatches(SequentialSampler(Numbers()), 4, False)), {},
    ),
    "single samples": (lambda: DataLoader(Numbers(), batch_size=None, sampler=ReversedSampler()), {}),
    "a stream": (lambda: DataLoader(NumberStream(), 4), {}),
    "a stream of known length": (lambda: DataLoader(SizedNumberStream(), 4), {}),
    "a list of tensors": (lambda: [torch.arange(4.0), torch.arange(4.0) + 4], {}),
    "a list of loaders": (lambda: [make_loader(16), make_loader(8, 2)], {}),
    "a dict of loaders": (lambda: {"a": make_loader(16), "b": make_loader(8, 2)}, {}),
    "min_size": (combined("min_size"), {}),
    "max_size": (combined("max_size"), {}),
    "max_size_cycle": (combined("max_size_cycle"), {}),
    "a data module": (NumbersModule, {"num_sanity_val_steps": 1}),
    "limit_train_batches": (lambda: make_loader(32), {"limit_train_batches": 3}),
    "a part of the batches": (lambda: make_loader(32), {"limit_train_batches": 0.5}),
    "limited stream": (lambda: DataLoader(NumberStream(32), 4), {"limit_train_batches": 3}),
    "overfit_batches": (lambda: make_loader(32, shuffle=True), {"overfit_batches": 2}),
    "overfit_batches of a sampler": (lambda: make_loader(16, sampler=ReversedSampler()), {"overfit_batches": 0.5}),
    "max_steps": (make_loader, {"max_steps": 5}),
    "accumulated": (lambda: make_loader(28), {"accumulate_grad_batches": 3}),
    "a schedule of accumulation": (lambda: make_loader(20), {"schedule": {0: 1, 1: 2, 2: 4}, "max_epochs": 3}),
    "no distributed sampler": (make_loader, {"use_distributed_sampler": False}),
    "no distributed sampler, shuffled": (
        lambda: make_loader(shuffle=True, generator=torch.Generator().manual_seed(7)), {"use_distributed_sampler": False},
    ),
    "loaders made again": (make_loader, {"reload_dataloaders_every_n_epochs": 1}),
}  # fmt: skip
SHUFFLED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (lambda: make_loader(shuffle=True), {}),
    "shuffled, the last batch smaller": (lambda: make_loader(13, shuffle=True), {}),
}


def fit(name: str, strategy: Any, devices: int = 1, skips: bool = False) -> dict[str, Any]:
    """Fit two epochs; return the samples of the steps of this rank, and the final weight."""
    make_data, case_options = {**CASES, **SHUFFLED}[name]
    seed_everything(1, verbose=False)
    options = {"max_epochs": 2, **case_options}
    schedule = options.pop("schedule", None)
    callbacks = [] if schedule is None else [GradientAccumulationScheduler(schedule)]
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
        **options,
    )
    module, data = RecordsSamples(skips), make_data()
    if isinstance(data, LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data)
    return {
        "seen": module.seen,
        "checked": module.checked,
        "weight": module.weight.item(),
        "global_step": trainer.global_step,
    }
