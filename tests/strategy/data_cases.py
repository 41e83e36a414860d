"""Ways to give data to a trainer, and which samples every rank then sees."""

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
    """Give numbered samples."""

    def __init__(self, size: int = 16, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.first + index))


class Numbered(IterableDataset):
    """Give as many numbers, and say how many or not."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.tensor(float(number)) for number in range(self.size))


class Known(Numbered):
    def __len__(self) -> int:
        return self.size


class Backwards(Sampler):
    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


class Growing(BatchSampler):
    """Give batches of one, two, three samples."""

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


class Sees(LightningModule):
    """Write down the samples of every step, and train a number towards them.

    Args:
        data: Makes the training data, or a data module.
        skips: Whether a step returns None for some batches.
    """

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[Any] = []
        self.skips, self.checked = skips, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.seen.append((batch_idx, listed(batch), self.trainer.accumulate_grad_batches))
        if self.skips and batch_idx % 2:
            return None
        tensors = list(leaves(batch))
        return torch.stack([((self.weight - one / 10) ** 2).mean() for one in tensors]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.checked.append((dataloader_idx, batch_idx, listed(batch)))
        self.log("checked", batch.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=0.05)


def leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from leaves(value)
    elif batch is not None:
        for value in batch:
            yield from leaves(value)


def listed(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: listed(value) for name, value in batch.items()}
    return (
        batch
        if batch is None or isinstance(batch, (int, float))
        else [listed(value) for value in batch]
    )


class Module(LightningDataModule):
    def train_dataloader(self) -> Any:
        return {"a": DataLoader(Numbers(), 4), "b": DataLoader(Numbers(16, 100), 2)}

    def val_dataloader(self) -> Any:
        return [DataLoader(Numbers(6), 4), DataLoader(Numbers(4, 50), 2)]


def of(size: int = 16, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Numbers(size), batch_size, **options)


def weighted() -> Sampler:
    return WeightedRandomSampler([1.0, 5.0] * 8, 12, generator=torch.Generator().manual_seed(3))


def twice(generator: int = 5) -> Sampler:
    return RandomSampler(
        Numbers(),
        replacement=True,
        num_samples=20,
        generator=torch.Generator().manual_seed(generator),
    )


def combined(mode: str) -> Callable[[], CombinedLoader]:
    return lambda: CombinedLoader({"long": of(16), "short": of(8, 2)}, mode)


#: Data, options of the Trainer, and whether steps skip batches.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "in order": (of, {}),
    "a smaller last batch": (lambda: of(14), {}),
    "drop_last": (lambda: of(14, drop_last=True), {}),
    "shuffled by a generator": (lambda: of(shuffle=True, generator=torch.Generator().manual_seed(7)), {}),
    "a sampler": (lambda: of(sampler=Backwards()), {}),
    "a weighted sampler": (lambda: of(sampler=weighted()), {}),
    "with replacement": (lambda: of(sampler=twice()), {}),
    "batches that grow": (
        lambda: DataLoader(Numbers(), batch_sampler=Growing(SequentialSampler(Numbers()), 4, False)), {},
    ),
    "single samples": (lambda: DataLoader(Numbers(), batch_size=None, sampler=Backwards()), {}),
    "a stream": (lambda: DataLoader(Numbered(), 4), {}),
    "a stream of known length": (lambda: DataLoader(Known(), 4), {}),
    "a list of tensors": (lambda: [torch.arange(4.0), torch.arange(4.0) + 4], {}),
    "a list of loaders": (lambda: [of(16), of(8, 2)], {}),
    "a dict of loaders": (lambda: {"a": of(16), "b": of(8, 2)}, {}),
    "min_size": (combined("min_size"), {}),
    "max_size": (combined("max_size"), {}),
    "max_size_cycle": (combined("max_size_cycle"), {}),
    "a data module": (Module, {"num_sanity_val_steps": 1}),
    "limit_train_batches": (lambda: of(32), {"limit_train_batches": 3}),
    "a part of the batches": (lambda: of(32), {"limit_train_batches": 0.5}),
    "limited stream": (lambda: DataLoader(Numbered(32), 4), {"limit_train_batches": 3}),
    "overfit_batches": (lambda: of(32, shuffle=True), {"overfit_batches": 2}),
    "overfit_batches of a sampler": (lambda: of(16, sampler=Backwards()), {"overfit_batches": 0.5}),
    "max_steps": (of, {"max_steps": 5}),
    "accumulated": (lambda: of(28), {"accumulate_grad_batches": 3}),
    "a schedule of accumulation": (lambda: of(20), {"schedule": {0: 1, 1: 2, 2: 4}, "max_epochs": 3}),
    "no distributed sampler": (of, {"use_distributed_sampler": False}),
    "no distributed sampler, shuffled": (
        lambda: of(shuffle=True, generator=torch.Generator().manual_seed(7)), {"use_distributed_sampler": False},
    ),
    "loaders made again": (of, {"reload_dataloaders_every_n_epochs": 1}),
}  # fmt: skip
SHUFFLED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (lambda: of(shuffle=True), {}),
    "shuffled, the last batch smaller": (lambda: of(13, shuffle=True), {}),
}


def fit(name: str, strategy: Any, devices: int = 1, skips: bool = False) -> dict[str, Any]:
    """Fit two epochs; return what the steps of this rank saw, and the weight that they end with."""
    make, chosen = {**CASES, **SHUFFLED}[name]
    seed_everything(1, verbose=False)
    options = {"max_epochs": 2, **chosen}
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
    module, data = Sees(skips), make()
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
