"""Recipes set schedules of the learning rate and of the weight decay, and name validation sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.models.token_module import TokenModule
from lightning_megatron.strategy.cli import MegatronCLI

RECIPE = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 8
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: {class_path: lightning_megatron.MegatronStrategy}
model:
  class_path: lightning_megatron.CausalLM
  init_args:
    config: {vocab_size: 20, max_seq_length: 8, num_layers: 1, hidden_size: 16, num_heads: 2}
    learning_rate: 0.01
    lr_schedule:
      class_path: lightning_megatron.WSDSchedule
      init_args: {num_steps: "${trainer.max_steps}", decay_steps: 4, decay: linear, warmup_steps: 2}
    weight_decay_schedule:
      class_path: lightning_megatron.WeightDecaySchedule
      init_args: {start: 0.0, end: 0.4, num_steps: "${trainer.max_steps}"}
data:
  class_path: tests.cli_modules.Counting
"""


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])


def test_schedules_of_a_recipe_set_learning_rate_and_weight_decay(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    # The fit ends in the middle of the schedules, which span the number of steps in the recipe.
    options = ["--trainer.limit_train_batches=3", "--trainer.max_epochs=2"]
    options.append(f"--trainer.default_root_dir={tmp_path}")
    cli = MegatronCLI(args=["fit", "-c", str(recipe), *options])
    assert cli.trainer.global_step == 6
    matrices, vectors = cli.trainer.optimizers[0].param_groups
    assert (matrices["lr"], matrices["weight_decay"]) == pytest.approx((0.005, 0.3))
    assert (vectors["lr"], vectors["weight_decay"]) == pytest.approx((0.005, 0.0))
    assert cli.model.hparams["lr_schedule"]["init_args"]["num_steps"] == 8


SCHEDULES: dict[str, dict[str, float]] = {
    "ConstantSchedule": {},
    "LinearSchedule": {"num_steps": 8, "min_ratio": 0.1},
    "CosineSchedule": {"num_steps": 8, "min_lr": 0.001},
    "InverseSqrtSchedule": {"min_lr": 0.001},
}


def test_every_schedule_is_taken_from_a_recipe(tmp_path):
    config = yaml.safe_load(RECIPE)
    for name, arguments in SCHEDULES.items():
        arguments = {"warmup_steps": 2, **arguments}
        rate = {"class_path": f"lightning_megatron.{name}", "init_args": arguments}
        config["model"]["init_args"]["lr_schedule"] = rate
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(config))
        module: Any = MegatronCLI(TokenModule, args=["-c", str(recipe)], run=False).model
        module.configure_model()
        (optimizer,), (rates, decays) = module.configure_optimizers()
        values = []
        for _ in range(3):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            rates["scheduler"].step()
            decays["scheduler"].step()
        # The warm-up of two steps rises to the peak.
        assert values == pytest.approx([0.0, 0.005, 0.01])
        assert type(rates["scheduler"]).__name__ == name
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.4 * 3 / 8)


def write_corpus(prefix: Path) -> str:
    with TokenFileWriter(prefix, dtype="i4") as writer:
        writer.add_document(np.arange(20))
    return str(prefix)


def test_validation_sets_of_a_recipe_are_logged_by_name(tmp_path):
    config = yaml.safe_load(RECIPE)
    news = write_corpus(tmp_path / "news")
    val = {"news": news, "code": [write_corpus(tmp_path / name) for name in ("c", "python")]}
    config["trainer"] |= {"limit_val_batches": None, "default_root_dir": str(tmp_path)}
    config["trainer"] |= {"val_check_interval": 8, "check_val_every_n_epoch": None}
    files = {"train": news, "val": val, "test": {"only": news}, "seq_length": 8}
    config["data"] = {"class_path": "lightning_megatron.TokenDataModule", "init_args": files}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config, sort_keys=False))
    cli = MegatronCLI(args=["fit", "-c", str(recipe)])
    assert cli.datamodule.set_names == {"val": ("news", "code"), "test": ("only",)}
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    assert (metrics["val_tokens/news"], metrics["val_tokens/code"]) == (19.0, 38.0)
    mean = (19 * metrics["val_loss/news"] + 38 * metrics["val_loss/code"]) / 57
    assert metrics["val_loss"] == pytest.approx(mean)
