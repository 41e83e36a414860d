"""Small token files, and a module that records what a Trainer feeds it."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_megatron.data.datamodule import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter

SEQ_LENGTH = 4


class Recorder(LightningModule):
    """Record the first token of every row that is trained on: it names the window."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        assert batch["tokens"].shape == batch["labels"].shape
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        self.seen.append(batch["tokens"][:, 0].tolist())
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.validated.append(batch["labels"][batch["labels"] != -100].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


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
    module: Recorder, data: TokenDataModule, trainer: Trainer, ckpt_path: Path | None = None
) -> list[list[int]]:
    with warnings.catch_warnings():
        # what Lightning says about workers, checkpoint folders and eval mode does not matter here
        warnings.simplefilter("ignore")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen
