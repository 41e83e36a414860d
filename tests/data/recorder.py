"""Small token files, modules that record the rows on which a Trainer trains, and killed runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_megatron.data.row_datamodule import RowDataModule
from lightning_megatron.data.token_file import TokenFile, TokenFileWriter

SEQ_LENGTH = 4


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
        inputs, labels = batch["tokens"][:, 1:], batch["labels"][:, :-1]
        # The last token of a row of whole documents is only a label.
        is_both = (labels != -100) & (inputs != 0)
        assert torch.equal(inputs[is_both], labels[is_both])
        return batch["tokens"][:, 0].tolist()

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.validated.append(batch["labels"][batch["labels"] != -100].tolist())


class StopAfter(Callback):
    """Callback that saves a checkpoint after some batches and then interrupts the run."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def write_corpus(prefix: Path, num_tokens: int, first: int = 0) -> str:
    """Write documents of 10 ascending tokens."""
    write_documents(prefix, [10] * (num_tokens // 10), first)
    return str(prefix)


def write_documents(prefix: Path, lengths: list[int], first: int = 0) -> TokenFile:
    """Write documents of ascending tokens."""
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
    return TokenFile(prefix)


def make_trainer(root: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """Return a quiet Trainer."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any("Checkpoint" in type(each).__name__ for each in callbacks),
    }
    return Trainer(
        **{**defaults, "default_root_dir": root, "callbacks": list(callbacks), **options}
    )


def run(
    module: Watcher, data: RowDataModule, trainer: Trainer, ckpt_path: Path | None = None
) -> list[list[Any]]:
    """Train, and return the rows that a module recorded."""
    with warnings.catch_warnings():
        # Lightning's warnings about workers, checkpoint folders and eval mode do not matter here.
        warnings.simplefilter("ignore")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen


def check_resumes(trained: Callable[..., list[list[Any]]], folder: Path, *stops: int) -> list:
    """Check that runs that are killed after some batches continue with the next row; return the
    batches of the uninterrupted run. ``trained`` gets callbacks and ``ckpt_path``.
    """
    uninterrupted, killed = trained(), folder / "killed.ckpt"
    for stop in stops:
        first = trained(StopAfter(stop, killed))
        assert first == uninterrupted[:stop]
        assert first + trained(ckpt_path=killed) == uninterrupted, f"after {stop} batches"
    return uninterrupted
