"""On a GPU, too, a resumed training has the bits of an uninterrupted one, if torch's operators repeat theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from lightning_megatron import MegatronStrategy
from tests.strategy.tiny import loader
from tests.training.fused_fits import FusedLM


def train(steps: int, precision: Any, folder: Path, resume_from: Path | None = None) -> tuple[FusedLM, Trainer]:
    """Train up to a step with dropout, clipping and the fused update."""
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=MegatronStrategy(async_save=True),
        precision=precision,
        deterministic=True,
        max_steps=steps,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = FusedLM(hidden_dropout=0.1)
    # Four batches: the save is at the end of an epoch, as for any dataloader that cannot be resumed inside of one.
    trainer.fit(module, loader(16), ckpt_path=resume_from)
    return module, trainer


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_resumed_training_has_equal_bits(precision: str, tmp_path: Path) -> None:
    try:
        whole, _ = train(8, precision, tmp_path)
        _, first = train(4, precision, tmp_path)
        first.save_checkpoint(tmp_path / "saved")
        resumed, _ = train(8, precision, tmp_path, tmp_path / "saved")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(whole.losses) == 8
    assert resumed.losses == whole.losses[4:]
    weights: dict[str, Tensor] = whole.state_dict()
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, weights[name]), name
