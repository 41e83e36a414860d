"""Named validation and test sets: each set has the mean loss of its tokens, and all sets together
that of all tokens, in every layout.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F

from lightning_megatron import CausalLM, GPTConfig, TokenDataModule
from tests.data.recorder import write_corpus
from tests.fits import Job, trainer_of
from tests.world import run_world

CONFIG = GPTConfig.llama(
    vocab_size=128, max_seq_length=8, num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=32
)
LAYOUTS: dict[str, Any] = {
    "ddp": "ddp",
    "dp2": {"microbatch_size": None},
    "tp2": {"tp": 2, "tensor_parallel_plan": {}, "microbatch_size": None},
    "pp2": {"pp": 2},
}


def make_trainer(
    strategy: Any, size: int, folder: Path, *callbacks: Any, **options: Any
) -> Trainer:
    warnings.simplefilter("ignore")
    job = Job(
        strategy=strategy, steps=4,
        trainer={
            "logger": CSVLogger(folder, "csv", version=0), "log_every_n_steps": 1,
            "default_root_dir": folder, "gradient_clip_val": None, **options,
        },
    )  # fmt: skip
    return trainer_of(job, size, *callbacks)


def numbers_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(paths: dict[str, Any], strategy: Any, size: int, folder: Path) -> dict[str, Any]:
    """Fit with validation after every second step, go on from step 2 with one validation batch of
    each set, test, and return the logged metrics.
    """
    module = CausalLM(CONFIG, learning_rate=1e-2, max_steps=9)
    data = TokenDataModule(**paths, seq_length=8, global_batch_size=4)
    best = ModelCheckpoint(folder, "{step}", "val_loss", save_top_k=-1)
    options: dict[str, Any] = {"val_check_interval": 2, "enable_checkpointing": True}
    trainer = make_trainer(strategy, size, folder, best, **options)
    trainer.fit(module, data)
    logged = {"fit": numbers_of(trainer), "best": {"loss": float(best.best_model_score or 0.0)}}
    limited = make_trainer(strategy, size, folder / "two", limit_val_batches=1)
    limited.fit(module, data, ckpt_path=folder / "step=2.ckpt")
    logged["limited"] = numbers_of(limited)
    trainer.test(module, data, verbose=False)
    return logged | {"test": numbers_of(trainer)}


def run_two(rank: int, size: int, folder: Path, paths: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = fit(paths, layout, size, folder / name)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write corpora whose sets have different sizes and texts."""
    folder = tmp_path_factory.mktemp("corpora")
    return {
        "train": write_corpus(folder / "train", 100),
        "val": {
            "low": write_corpus(folder / "low", 50),
            "high": [write_corpus(folder / "more", 20, 60), write_corpus(folder / "most", 20, 100)],
        },
        "test": {"only": write_corpus(folder / "only", 30, 30)},
    }


def test_losses_of_sets_match_one_process(tmp_path: Path, paths: Any) -> None:
    alone = fit(paths, None, 1, tmp_path)
    for logged in run_world(run_two, 2, tmp_path / "two", paths):
        for layout in LAYOUTS:
            for phase, expected in alone.items():
                assert logged[layout][phase] == pytest.approx(expected, rel=1e-10), (layout, phase)
    # Monitors and loggers get the loss of all sets.
    assert alone["best"]["loss"] == pytest.approx(alone["fit"]["val_loss"])
    rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    assert {"val_loss", "val_loss/low", "val_loss/high", "test_loss", "test_loss/only"} <= {*names}
    assert not [name for name in names if "_tokens" in name or "dataloader" in name]
    # The resumed run validates only the first batch of each set, which has the row of a single
    # token.
    assert alone["limited"]["val_tokens/low"] == 25.0
    assert alone["fit"]["val_tokens/low"] == 49.0
    assert alone["fit"]["val_tokens/high"] == 38.0


def test_losses_are_means_over_the_tokens_of_each_set_and_of_all_sets(
    tmp_path: Path, paths: Any
) -> None:
    module, data = CausalLM(CONFIG), TokenDataModule(**paths, seq_length=8, batch_size=3)
    trainer = make_trainer(None, 1, tmp_path)
    trainer.validate(module, data, verbose=False)
    metrics, by_set = numbers_of(trainer), {}
    for name, loader in zip(("low", "high"), data.val_dataloader(), strict=True):
        losses = []
        for batch in loader:
            logits, labels = module.model(batch["tokens"]), batch["labels"]  # type: ignore[misc]
            counted = labels != -100
            losses.append(F.cross_entropy(logits[counted], labels[counted], reduction="none"))
        by_set[name] = torch.cat(losses)
        assert metrics[f"val_loss/{name}"] == pytest.approx(by_set[name].mean().item(), rel=1e-10)
    assert {name: len(losses) for name, losses in by_set.items()} == {"low": 49, "high": 38}
    mean = torch.cat([*by_set.values()]).mean().item()
    assert metrics["val_loss"] == pytest.approx(mean, rel=1e-10)
    assert abs(metrics["val_loss/low"] - metrics["val_loss/high"]) > 1e-4
