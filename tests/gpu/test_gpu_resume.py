"""Test that a resumed training on a GPU has the bits of an uninterrupted training, if torch's
operators are deterministic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import MegatronStrategy
from tests.strategy.tiny import loader
from tests.training.fused_fits import FusedLM


def train(precision: Any, folder: Path, resume_from: Path | None = None) -> FusedLM:
    """Train two epochs with dropout, clipping and fused updates, and save after each epoch."""
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=MegatronStrategy(async_save=True),
        precision=precision,
        deterministic=True,
        max_epochs=2,
        gradient_clip_val=0.1,
        logger=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = FusedLM(hidden_dropout=0.1)
    trainer.fit(module, loader(16), ckpt_path=resume_from)
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_training(
    precision: str, tmp_path: Path
) -> None:
    try:
        uninterrupted = train(precision, tmp_path / "whole")
        resumed = train(precision, tmp_path / "resumed", tmp_path / "whole" / "epoch=0.ckpt")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(uninterrupted.losses) == 8
    assert resumed.losses == uninterrupted.losses[4:]
    weights: dict[str, Tensor] = uninterrupted.state_dict()
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, weights[name]), name
