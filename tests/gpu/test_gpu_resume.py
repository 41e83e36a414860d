"""Test that a resumed training on a GPU has the bits of an uninterrupted training, if torch's
operators are deterministic.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.fits import Report, Tokens, joined, run_job
from tests.graphs.jobs import DROPOUT
from tests.optimizer.fused_fits import FusedLanguage, fused_job


def train(precision: Any, folder: Path, resume_from: Path | None = None) -> Report:
    """Train two epochs with dropout, clipping and fused updates, and save after each epoch."""
    job = fused_job(lambda: FusedLanguage(DROPOUT), precision, gradient_clip_val=0.1)
    gpu = {
        "accelerator": "gpu",
        "deterministic": True,
        "max_epochs": 2,
        "enable_checkpointing": True,
    }
    return run_job(
        replace(
            job,
            strategy={"async_save": True},
            trainer={**job.trainer, **gpu},
            data=partial(Tokens, 32, 32),
            callbacks=lambda: [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
            resume=None if resume_from is None else str(resume_from),
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_training(precision, tmp_path):
    try:
        uninterrupted = train(precision, tmp_path / "whole")
        resumed = train(precision, tmp_path / "resumed", tmp_path / "whole" / "epoch=0.ckpt")
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(uninterrupted.losses) == 8
    assert resumed.losses == uninterrupted.losses[4:]
    weights = joined([uninterrupted])
    for name, weight in joined([resumed]).items():
        assert torch.equal(weight, weights[name]), name
