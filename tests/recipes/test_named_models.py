"""Recipes that name a model and a number of GPUs fit the published configuration of the model."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recipe_speeds import CASES as SPEEDS
from benchmarks.recipe_speeds import MODELS
from lightning_megatron import HuggingFaceCausalLM, LoraSettings, MegatronStrategy, ParallelLayout
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import GIB, TrainingShape, static_bytes
from lightning_megatron.strategy.optimization.precision import PRECISIONS
from lightning_megatron.swap.families.known import family_of
from tests.recipes.test_recipes import NAMES, RECIPES, config_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
#: Share of a GPU's memory that an estimate may need; the driver, NCCL and gaps need some, too.
USABLE = 0.9
CASES = [(model, name) for name in NAMES for model in MODELS if name.startswith(f"{model}_")]


def test_each_model_has_recipes():
    assert {model for model, _ in CASES} == set(MODELS)
    assert set(SPEEDS) <= set(NAMES)


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


def training_of(config: dict[str, Any], layout: ParallelLayout) -> TrainingShape:
    """Return what a step of a recipe keeps, with fused AdamW."""
    trainer, data = config["trainer"], config["data"]["init_args"]
    options = MegatronStrategy(**trainer["strategy"]["init_args"]).options
    dtypes = PRECISIONS[trainer["precision"]]
    main = dtypes.main_parameters or dtypes.parameters
    sizes = {"float32": main.itemsize, "bfloat16": 2}
    microbatch = trainer["strategy"]["init_args"]["microbatch_size"]
    return TrainingShape(
        seq_length=data["seq_length"],
        microbatch_size=microbatch,
        num_microbatches=data["global_batch_size"] // layout.dp // microbatch,
        sequence_parallel=options.shards_sequence,
        recompute=options.recompute or "none",
        loss_chunk=options.loss_chunk,
        expert_transport=options.experts.transport,
        expert_rows=options.experts.rows,
        parameter_bytes=dtypes.parameters.itemsize,
        activation_bytes=dtypes.parameters.itemsize,
        gradient_bytes=sizes[options.optimizer.gradient_dtype],
        main_bytes=main.itemsize if dtypes.main_parameters else 0,
        state_bytes=2 * sizes[options.optimizer.moments_dtype],
    )


def adapter_size(lora: LoraSettings, published: dict[str, Any], folder: Path) -> int:
    """Count the elements of a model's adapters, of which all layers have equally many."""
    two = published | {"num_hidden_layers": 2, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(two))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    trained = [one for one in lora.adapted(built).parameters() if one.requires_grad]
    return sum(one.numel() for one in trained) // 2 * published["num_hidden_layers"]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_memory_of_a_recipe_fits_its_gpu_and_is_what_its_head_and_the_page_say(
    model, name, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    published = MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(published))
    settings = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    shape = family_of(published["architectures"][0]).config(settings)
    assert isinstance(shape, GPTConfig)
    config = config_of(capsys, f"--config=recipe:{name}", f"--model.path={tmp_path}")
    trainer, lora = config["trainer"], config["model"]["init_args"]["lora"]
    options = trainer["strategy"]["init_args"]
    layout = ParallelLayout(world_size=trainer["devices"], tp=options["tp"], ep=options["ep"])
    training = training_of(config, layout)
    adapters = 0
    if lora is not None:
        assert layout.tp == 1, "adapters are whole on each rank"
        size = adapter_size(LoraSettings(**lora), published, tmp_path)
        adapters = sum(static_bytes(size, layout.dp, training).values())
        # Frozen weights have neither gradients nor main parameters nor optimizer states.
        training = replace(training, gradient_bytes=0, main_bytes=0, state_bytes=0)
    kind = "cpu" if trainer["accelerator"] == "cpu" else "cuda"
    (stage,) = estimate_memory(shape, layout, training, kind)
    static, peak = stage.static + adapters, stage.peak + adapters
    head = (RECIPES / f"{name}.yaml").read_text()
    assert re.search(rf"^# Memory of [a-zA-Z ]+: {peak / GIB:.1f} GiB, as estimate_", head, re.M)
    page = (RECIPES.parent / "docs/recipes.md").read_text()
    _, _, section = page.partition("## Memory of fine-tuning\n")
    named = re.search(r"GPUs? of (\d+) GB", head)
    assert (named is None) == (trainer["accelerator"] == "cpu")
    cells = ["none: one process" if named is None else f"{named[1]} GB", layout.tp, layout.ep]
    cells += [training.recompute, f"{static / GIB:.1f}", f"{peak / GIB:.1f}"]
    assert " | ".join([f"| `{name}`", *map(str, cells)]) + " |" in section.splitlines()
    assert named is None or peak < USABLE * int(named[1]) * 1e9
    if named is not None and model == "qwen3_30b_a3b":
        automatic = replace(training, expert_transport="auto")
        (worst,) = estimate_memory(shape, layout, automatic)
        assert worst.peak + adapters > int(named[1]) * 1e9, "the recipe can leave its transport out"
        assert f" {(worst.peak + adapters) / GIB:.0f} " in section
