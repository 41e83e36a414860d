"""Every recipe that comes with the package parses and has consistent values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron import ParallelLayout
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import MissingExtraError
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.strategy.cli import MegatronCLI

RECIPES = Path(__file__).parents[2] / "recipes"
OVERLAYS = {"gpt_speeches_1process": ["gpt_speeches_cpu"]}
#: Batch size, learning rate and epochs of table 6 for 336 million parameters; the tasks set the
#: sizes of their epochs.
TABLE_6 = {
    "bert_mnli": (128, 1e-5, 10),
    "bert_qqp": (128, 5e-5, 12),
    "bert_race": (32, 2e-5, 3),
    "bert_squad": (64, 3e-5, 2),
}
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


def config_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Return the resolved configuration of a fit."""
    with pytest.raises(SystemExit, match="^0$"):
        MegatronCLI(args=["fit", *options, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def gigabytes_of(config: dict[str, Any], world_size: int) -> str:
    """Return the estimated memory of a GPU that trains a GPT by a recipe, in GiB."""
    data, model, strategy = (
        part["init_args"]
        for part in (config["data"], config["model"], config["trainer"]["strategy"])
    )
    layout = ParallelLayout(world_size=world_size, tp=strategy["tp"])
    microbatch = strategy["microbatch_size"]
    step = TrainingShape(
        seq_length=data["seq_length"],
        microbatch_size=microbatch,
        num_microbatches=data["global_batch_size"] // layout.dp // microbatch,
    )
    (stage,) = estimate_memory(GPTConfig(**model["config"]), layout, step)
    return f"{stage.peak / 2**30:.1f}"


@pytest.mark.parametrize("size", ["355m", "1.2b", "2.5b", "8.3b"])
def test_memory_of_a_gpt_2_is_what_its_head_and_the_page_say(size, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    config = config_of(capsys, f"--config=recipe:gpt2_{size}")
    estimates = [gigabytes_of(config, world_size) for world_size in (8, 64)]
    head = (RECIPES / f"gpt2_{size}.yaml").read_text()
    assert f"Memory of each of 8 GPUs: {estimates[0]} GiB" in head
    page = (RECIPES.parent / "docs/recipes.md").read_text()
    estimated, _, _ = page.partition("## Memory of fine-tuning\n")
    (row,) = [line for line in estimated.splitlines() if line.startswith(f"| `gpt2_{size}` |")]
    assert row.endswith(f"| {' | '.join(estimates)} |")


@pytest.mark.parametrize("name", NAMES)
def test_values_of_a_recipe_fit_each_other(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    files = [f"--config=recipe:{file}" for file in [*OVERLAYS.get(name, []), name]]
    config = config_of(capsys, *files)
    data, model = (config[part]["init_args"] for part in ("data", "model"))
    trainer, kind = config["trainer"], config["model"]["class_path"].rpartition(".")[2]
    classes = [one["class_path"].rpartition(".")[2] for one in trainer["callbacks"]]
    assert classes[:2] == ["TokensProgressBar", "RunReport"]
    assert classes[-2:] == ["TrainingMetrics", "RunCheckpoint"]
    assert trainer["logger"]["class_path"].endswith(".RunLogger")
    microbatch = trainer["strategy"]["init_args"]["microbatch_size"]
    batch = data.get("batch_size") or data["global_batch_size"]
    assert batch % microbatch == 0
    if "path" in model:
        assert data["tokenizer"] == model["path"]
    if name in TABLE_6:
        assert (batch, model["learning_rate"], trainer["max_epochs"]) == TABLE_6[name]
        assert batch // 8 % microbatch == 0, "batches of eight GPUs are multiples"
        saving = trainer["callbacks"][-1]["init_args"]
        assert saving["monitor"] == ("val_f1" if name == "bert_squad" else "val_accuracy")
        return
    assert model["max_steps"] == trainer["max_steps"]
    if "path" in model:
        return
    shape = (EncoderConfig if kind == "BERTPretraining" else GPTConfig)(**model["config"])
    assert shape.max_seq_length == data["seq_length"]
    try:
        tokenizer = load_tokenizer(data["tokenizer"])
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert model["config"]["vocab_size"] == tokenizer.vocab_size


TINY = """
--model.config.num_layers=1 --model.config.hidden_size=16 --model.config.num_heads=2
--data.seq_length=16 --data.tokenizer=bytes
--data.global_batch_size=4 --data.num_workers=0 --trainer.accelerator=cpu --trainer.devices=1
--trainer.precision=32-true --trainer.max_steps=3
"""


def test_text_of_your_own_trains_by_one_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-megatron"])
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / f"text/{number}.txt").write_text("Our fathers brought forth a nation. " * 4)
    place = [f"--data.train={tmp_path / 'text'}", f"--trainer.default_root_dir={tmp_path}"]
    cli = MegatronCLI(args=["fit", "--config=recipe:pretrain_text", *TINY.split(), *place])
    assert cli.trainer.global_step == 3
    assert cli.model.vocab_size == 257
    saved = tmp_path / "pretrain_text/version_0/checkpoints"
    assert [path.name for path in saved.iterdir()] == ["last.ckpt"]
