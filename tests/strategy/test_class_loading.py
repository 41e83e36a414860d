"""Lightning's ``load_from_checkpoint`` refuses directories with a remedy, and reads plain files."""

from __future__ import annotations

import inspect
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.core import saving
from torch import nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.consolidate import consolidate
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.strategy.class_loading import install_directory_check


class SmallNet(L.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_loading_a_directory_is_refused_with_a_command_that_makes_it_loadable(
    tmp_path: Path,
) -> None:
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "max_steps": 1,
    }
    trainer = L.Trainer(strategy=MegatronStrategy(), default_root_dir=tmp_path, **options)
    module = SmallNet()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 3), batch_size=2))
    best = trainer.checkpoint_callback.best_model_path
    for path in (best, Path(best)):
        with pytest.raises(
            CheckpointMismatchError, match="is a directory that MegatronStrategy saved"
        ) as caught:
            SmallNet.load_from_checkpoint(path)
    assert f"checkpoint consolidate {best} plain.ckpt --weights-only" in str(caught.value)
    consolidate(best, tmp_path / "plain.ckpt", weights_only=True)
    loaded = SmallNet.load_from_checkpoint(tmp_path / "plain.ckpt")
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    with pytest.raises(OSError, match="missing"):
        SmallNet.load_from_checkpoint(tmp_path / "missing.ckpt")
    with pytest.raises(IsADirectoryError):
        SmallNet.load_from_checkpoint(tmp_path)


def test_lightning_loads_by_the_replaced_function_which_is_replaced_once() -> None:
    assert "checkpoint = pl_load(checkpoint_path, " in inspect.getsource(
        saving._load_from_checkpoint
    )
    reader = saving.pl_load
    install_directory_check()
    assert saving.pl_load is reader
