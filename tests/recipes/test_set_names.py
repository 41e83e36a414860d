"""Tests that a fit logs the validation sets of a recipe by their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from lightning_megatron.strategy.cli import MegatronCLI
from tests.data.recorder import write_corpus
from tests.recipes.test_schedules import RECIPE


def test_validation_sets_of_a_recipe_are_logged_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    config = yaml.safe_load(RECIPE)
    val = {
        "news": write_corpus(tmp_path / "news", 20),
        "code": [write_corpus(tmp_path / name, 20) for name in ("c", "python")],
    }
    config["trainer"] |= {
        "limit_val_batches": None,
        "max_steps": 8,
        "default_root_dir": str(tmp_path),
    }
    config["data"] = {
        "class_path": "lightning_megatron.TokenDataModule",
        "init_args": {
            "train": val["news"],
            "val": val,
            "test": {"only": val["news"]},
            "seq_length": 8,
        },
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config, sort_keys=False))
    cli = MegatronCLI(
        args=[
            "fit",
            "-c",
            str(recipe),
            "--trainer.val_check_interval=4",
            "--trainer.check_val_every_n_epoch=null",
        ]
    )
    assert cli.datamodule.set_names == {"val": ("news", "code"), "test": ("only",)}
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    assert (metrics["val_tokens/news"], metrics["val_tokens/code"]) == (19.0, 38.0)
    mean = (19 * metrics["val_loss/news"] + 38 * metrics["val_loss/code"]) / 57
    assert metrics["val_loss"] == pytest.approx(mean)
