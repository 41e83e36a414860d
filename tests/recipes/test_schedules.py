"""Tests that recipes set the schedules of the learning rate and of the weight decay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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
  strategy:
    class_path: lightning_megatron.MegatronStrategy
model:
  class_path: lightning_megatron.CausalLM
  init_args:
    config: {vocab_size: 20, max_seq_length: 8, num_layers: 1, hidden_size: 16, num_heads: 2}
    learning_rate: 0.01
    lr_schedule:
      class_path: lightning_megatron.WSDSchedule
      init_args:
        num_steps: ${trainer.max_steps}
        decay_steps: 4
        decay: linear
        warmup_steps: 2
    weight_decay_schedule:
      class_path: lightning_megatron.WeightDecaySchedule
      init_args: {start: 0.0, end: 0.4, num_steps: "${trainer.max_steps}"}
data:
  class_path: tests.models.test_causal_lm.Counting
"""


def test_schedules_of_a_recipe_set_learning_rate_and_weight_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
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
    arguments = yaml.safe_load(RECIPE)["model"]["init_args"]["lr_schedule"]["init_args"]
    settings = cli.model.hparams["lr_schedule"]["init_args"]
    assert {name: settings[name] for name in arguments} == arguments | {"num_steps": 8}


SCHEDULES = """
ConstantSchedule: {warmup_steps: 2}
LinearSchedule: {warmup_steps: 2, num_steps: 8, min_ratio: 0.1}
CosineSchedule: {warmup_steps: 2, num_steps: 8, min_lr: 0.001}
WSDSchedule: {warmup_steps: 2, num_steps: 8, decay_steps: 4, min_ratio: 0.1}
InverseSqrtSchedule: {warmup_steps: 2, min_lr: 0.001}
"""
MODELS = """
CausalLM: {config: {vocab_size: 20, max_seq_length: 8, num_layers: 1, hidden_size: 16, num_heads: 2}}
HuggingFaceCausalLM: {path: FOLDER}
BERTPretraining:
  config:
    vocab_size: 20
    num_positions: 8
    num_layers: 1
    hidden_size: 16
    num_heads: 2
    ffn_hidden_size: 32
    head: pretraining
"""


@pytest.mark.parametrize("model", yaml.safe_load(MODELS))
def test_every_model_takes_every_schedule_from_a_recipe(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    settings = yaml.safe_load(MODELS)[model]
    if model == "HuggingFaceCausalLM":
        pytest.importorskip("transformers")
        from tests.tiny_llama import save_tiny_llama

        save_tiny_llama(tmp_path / "llama")
        settings = {"path": str(tmp_path / "llama")}
    for name, arguments in yaml.safe_load(SCHEDULES).items():
        config = yaml.safe_load(RECIPE)
        rate = {"class_path": f"lightning_megatron.{name}", "init_args": arguments}
        shared = config["model"]["init_args"]
        shared = {key: shared[key] for key in ("learning_rate", "weight_decay_schedule")}
        init_args = {**settings, **shared, "lr_schedule": rate}
        config["model"] = {"class_path": f"lightning_megatron.{model}", "init_args": init_args}
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(config))
        module = MegatronCLI(TokenModule, args=["-c", str(recipe)], run=False).model
        (optimizer,), (rates, decays) = _optimizers_of(module)
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


def _optimizers_of(module: Any) -> Any:
    module.configure_model()
    return module.configure_optimizers()
