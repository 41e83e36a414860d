"""Small token files, and modules that record the rows on which a Trainer trains."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_megatron.data.row_datamodule import RowDataModule
from lightning_megatron.data.token_file import TokenFileWriter

SEQ_LENGTH = 4

#: Runs that end by a number of steps, by passes, and with epochs shorter than a pass.
limited = pytest.mark.parametrize(
    "limits",
    [
        {"max_steps": 14, "max_epochs": -1},
        {"max_epochs": 3},
        {"max_steps": 14, "limit_train_batches": 4},
    ],
    ids=["steps", "passes", "short epochs"],
)


class Watcher(LightningModule):
    """Module that records an identifier of each row on which it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[Any]] = []
        self.validated: list[list[Any]] = []

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        """Return an identifier of each row: a weighted sum of all its tokens."""
        tokens = batch["tokens"]
        return (tokens * torch.arange(tokens.shape[1])).sum(1).tolist()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.seen.append(self.names_of(batch))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Recorder(Watcher):
    """Module that records the first tokens of windows, and the labels of validation."""

    def names_of(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        assert batch["tokens"].shape == batch["labels"].shape
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        return batch["tokens"][:, 0].tolist()

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.validated.append(batch["labels"][batch["labels"] != -100].tolist())


def write_corpus(prefix: Path, num_tokens: int, first: int = 0) -> str:
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for start in range(first, first + num_tokens, 10):
            writer.add_document(np.arange(start, start + 10))
    return str(prefix)


def make_trainer(root: Path, *callbacks: Callback, **options: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        **{**defaults, "default_root_dir": root, "callbacks": list(callbacks), **options}
    )


def run(
    module: Watcher, data: RowDataModule, trainer: Trainer, ckpt_path: Path | None = None
) -> list[list[Any]]:
    with warnings.catch_warnings():
        # Lightning's warnings about workers, checkpoint folders and eval mode do not matter here.
        warnings.simplefilter("ignore")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen
