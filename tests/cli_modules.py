"""A module and a data module small enough to run the command line with, without our models or
strategy.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):
    """Fit of a line, whose layer is built only in `configure_model`, as in large models."""

    def __init__(self, width: int = 4, context: int = 8) -> None:
        super().__init__()
        self.width, self.context = width, context
        self.layer: torch.nn.Linear | None = None

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = torch.nn.Linear(self.width, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(LightningDataModule):
    """Sixteen points, each with a row of token ids to count."""

    def __init__(self, context: int, batch_size: int = 2, width: int = 4) -> None:
        super().__init__()
        self.context, self.batch_size, self.width = context, batch_size, width

    def train_dataloader(self) -> DataLoader:
        tokens = torch.zeros(16, self.context, dtype=torch.long)
        points = TensorDataset(torch.ones(16, self.width), tokens)
        return DataLoader(points, batch_size=self.batch_size)

    val_dataloader = train_dataloader


class Counting(LightningDataModule):
    """Rows of token ids that count upwards, below 20."""

    bytes_per_token = 2.0

    def train_dataloader(self) -> DataLoader:
        rows = [(torch.arange(9) + start) % 20 for start in range(16)]
        return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=4)

    val_dataloader = train_dataloader
