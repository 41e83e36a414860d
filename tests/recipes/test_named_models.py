"""Recipes that name a model and a number of GPUs fit the published configuration of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import HuggingFaceCausalLM, LoraSettings, MegatronStrategy, ParallelLayout
from tests.recipes.test_recipes import NAMES, config_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
CONFIGS = json.loads((Path(__file__).parents[1] / "swap/published_configs.json").read_text())
#: Qwen3 8B is longer, wider and untied; its family is the same.
QWEN3_8B = CONFIGS["Qwen3-0.6B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama3_8b": CONFIGS["Llama-3.1-8B"],
    "qwen3_8b": QWEN3_8B,
    "qwen3_30b_a3b": CONFIGS["Qwen3-30B-A3B"],
    "gpt_oss_20b": CONFIGS["gpt-oss-20b"],
    "smollm2_135m": CONFIGS["SmolLM2-135M"],
}
CASES = [(model, name) for name in NAMES for model in MODELS if name.startswith(f"{model}_")]


def test_each_model_has_recipes():
    assert {model for model, _ in CASES} == set(MODELS)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_recipe_of_a_model_fits_its_configuration(model, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    published = MODELS[model] | {"num_hidden_layers": 2, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = config_of(capsys, f"--config=recipe:{name}", f"--model.path={tmp_path}")
    trainer, data = config["trainer"], config["data"]["init_args"]
    gpus = int(name.rpartition("_")[2].rstrip("gpus")) if "gpu" in name else 1
    assert (trainer["devices"], trainer["logger"]["init_args"]["name"]) == (gpus, name)
    options = trainer["strategy"]["init_args"]
    MegatronStrategy(**options)
    experts = published.get("num_experts") or published.get("num_local_experts")
    layout = ParallelLayout(world_size=gpus, tp=options["tp"], pp=options["pp"], ep=options["ep"])
    assert published["num_key_value_heads"] % layout.tp == 0
    assert (experts or layout.ep) % layout.ep == 0
    assert data["global_batch_size"] % (layout.dp * options["microbatch_size"]) == 0
    init = config["model"]["init_args"]
    settings = init.pop("lora")
    lora = settings and LoraSettings(**settings)
    module = HuggingFaceCausalLM(**init)
    assert module.vocab_size == published["vocab_size"]
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(module.config)
    assert (lora is not None) == ("_lora_" in name)
    if lora is not None:
        trained = [key for key, one in lora.adapted(built).named_parameters() if one.requires_grad]
        assert trained
        assert not any("expert" in key for key in trained)
