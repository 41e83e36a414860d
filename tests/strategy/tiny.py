"""A small GPT and its made-up text, the same under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_megatron import GPT, GPTConfig

VOCABULARY, LENGTH = 32, 9


class Words(Dataset):
    """Short sequences in which each token narrows down the next one."""

    def __init__(self, num_samples: int = 32, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
        steps = torch.randint(1, 3, (num_samples, LENGTH), generator=generator)
        self.tokens = (first + steps.cumsum(1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class Stream(IterableDataset):
    """The same sequences without a length; each of n data-parallel ranks takes every n-th one."""

    def __init__(self, rank: int, size: int, num_samples: int = 32) -> None:
        self.rank, self.size, self.words = rank, size, Words(num_samples)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(self.rank, len(self.words), self.size):
            yield self.words[index]


def loader(
    num_samples: int = 32, batch_size: int = 4, seed: int = 1, shuffle: bool = False
) -> DataLoader:
    """Make a data loader of made-up text."""
    return DataLoader(Words(num_samples, seed), batch_size=batch_size, shuffle=shuffle)


class TinyLM(LightningModule):
    """Train a small GPT; log in every way that Lightning supports.

    Args:
        schedule: ``step``, ``epoch``, ``plateau`` or none.
    """

    def __init__(self, schedule: str | None = "step", num_layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        sizes = {
            "vocab_size": VOCABULARY,
            "max_seq_length": 16,
            "num_layers": num_layers,
            "hidden_size": 16,
        }
        self.config = GPTConfig.gpt2(**{**sizes, "num_heads": 2, "vocab_multiple": 16, **options})
        self.schedule = schedule
        self.net: GPT | None = None
        self.hooks: list[str] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = GPT(self.config, mesh=self.device_mesh, seed=7)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.net is not None, "configure_model has run"
        return self.net(batch["tokens"], batch["labels"]).mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("loss_both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log(
            "count",
            float(len(batch["tokens"])),
            on_step=False,
            on_epoch=True,
            reduce_fx="sum",
            sync_dist=True,
        )
        return {"loss": loss, "batch_loss": loss.detach()}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self(batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self(batch)
        self.log_dict({"test_loss": loss, "test_half": loss / 2}, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None, "configure_model has run"
        return self.net(batch["tokens"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.schedule is None:
            return optimizer
        if self.schedule == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=10.0
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule},
        }

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("zero_grad")

    def on_after_backward(self) -> None:
        self.hooks.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("optimizer_step")
