"""Tests that BERT trains on BERTDataModule in every layout as in one process."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron import BERTDataModule, BERTPretraining, EncoderConfig, MegatronStrategy
from lightning_megatron.training.clip import grad_norm
from tests.bert_corpus import VOCABULARY, write_sentences, write_vocabulary
from tests.world import run_world

STEPS, LENGTH = 5, 32
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True, "microbatch_size": 4},
    "pp2": {"pp": 2, "microbatch_size": 2},
    "dp2": {"microbatch_size": 2},
}


@dataclass
class Record(pl.Callback):
    """Hold the losses of training and validation, and the gradients' norms."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.norms.append(float(grad_norm(trainer.strategy.run.state.main)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def train(folder: str, layout: dict[str, Any], size: int, workers: int) -> list[list[float]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    pl.seed_everything(1234, verbose=False)
    config = EncoderConfig.bert(
        vocab_size=VOCABULARY, num_positions=LENGTH, num_layers=2, hidden_size=24, num_heads=4,
        hidden_dropout=0.0, attention_dropout=0.0, init_std=0.2,
    )  # fmt: skip
    module = BERTPretraining(
        config, learning_rate=0.01, warmup_steps=2, schedule="linear", min_lr_ratio=0.0,
        weight_decay=0.01, betas=(0.9, 0.999), max_steps=STEPS + 1,
    )  # fmt: skip
    data = BERTDataModule(
        f"{folder}/corpus", f"{folder}/corpus", tokenizer=f"{folder}/vocab.txt", seq_length=LENGTH,
        global_batch_size=8, num_workers=workers,
    )  # fmt: skip
    record = Record()
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, strategy=MegatronStrategy(**layout), precision="64-true",
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, num_sanity_val_steps=0,
        limit_val_batches=0, callbacks=[record],
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.limit_val_batches = 1.0
    [metrics] = trainer.validate(module, data, verbose=False)
    record.val_losses = [metrics[f"val_{name}"] for name in ("loss", "lm_loss", "order_loss")]
    return [record.losses, record.norms, record.val_losses]


def train_all(rank: int, size: int, folder: str) -> dict[str, list[list[float]]]:
    return {
        name: train(folder, layout, size, workers=2 if name == "dp2" else 0)
        for name, layout in LAYOUTS.items()
    }


def train_alone(rank: int, size: int, folder: str) -> list[list[float]]:
    return train(folder, {"microbatch_size": 8}, 1, workers=0)


def test_every_layout_has_the_losses_and_norms_of_one_process(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", write_vocabulary(tmp_path / "vocab.txt"))
    [expected] = run_world(train_alone, 1, str(tmp_path))
    assert [len(values) for values in expected] == [STEPS, STEPS, 3]
    assert len(set(expected[0])) == STEPS
    for reports in run_world(train_all, 2, str(tmp_path)):
        for name in LAYOUTS:
            for values, expected_values in zip(reports[name], expected, strict=True):
                assert values == pytest.approx(expected_values, rel=0, abs=1e-10), name
