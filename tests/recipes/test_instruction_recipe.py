"""Tests that recipes for conversations and preference pairs train a small folder on two processes
as on one, also on streams.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_megatron.cli.main import main
from tests.chat_folder import conversations, preferences, save_chat_llama, write_lines
from tests.recipes.test_recipes import run_recipe
from tests.sweeps import chosen

#: Options with which recipes read their training files as a stream, and no options.
READING = {
    "stream": ["--data.streaming.shuffle_buffer=5", "--data.num_workers=1"],
    "encoded before": [],
}
reading = pytest.mark.parametrize("reading", chosen(list(READING), "stream"))


def options_of(tmp_path: Path, train: list, val: list, batch: int) -> list[str]:
    """Write a small folder and its files, and return the options for float32 on the CPU."""
    return [
        f"--model.path={save_chat_llama(tmp_path / 'model')}",
        f"--data.train={write_lines(tmp_path / 'a.jsonl', train)}",
        f"--data.val={write_lines(tmp_path / 'b.jsonl', val)}",
        "--data.seq_length=250",
        f"--data.global_batch_size={batch}",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
    ]


def check_encoded_before(tmp_path: Path, reading: str) -> None:
    """Check that the folder of encoded rows has the training set only if it was not a stream."""
    folders = [path for path in (tmp_path / "index_cache").iterdir() if path.is_dir()]
    assert len(folders) == (1 if reading == "stream" else 2)


def check_two_processes_match_one(
    tmp_path: Path, recipe: str, axis: str, options: list[str]
) -> dict[str, list[float]]:
    """Compare the losses of two processes, which share an axis, with those of one; return them."""
    layout = ["--trainer.devices=2", f"--trainer.strategy.{axis}=2"]
    two_processes = run_recipe(tmp_path / "two", recipe, options=[*options, *layout])
    alone = [*options, "--trainer.devices=1"]
    one_process = run_recipe(tmp_path / "one", recipe, options=alone, starts=False)
    assert (len(two_processes["train_loss"]), len(two_processes["val_loss"])) == (3, 1)
    for name in ("train_loss", "val_loss"):
        assert two_processes[name] == pytest.approx(one_process[name], abs=2e-4), name
    return two_processes


@pytest.mark.slow
@reading
def test_conversations_train_on_two_processes_as_on_one(tmp_path: Path, reading: str) -> None:
    pytest.importorskip("transformers")
    options = options_of(tmp_path, conversations(60), conversations(20, seed=2), 4)
    options += READING[reading]
    check_two_processes_match_one(tmp_path, "sft_hf.yaml", "tp", options)
    check_encoded_before(tmp_path, reading)


@pytest.mark.slow
def test_adapters_train_on_two_processes_as_on_one_and_are_exported(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    options = options_of(tmp_path, conversations(30), conversations(10, seed=2), 2)
    options += ["--model.lora.r=4", "--model.learning_rate=0.01", "--model.warmup_steps=0"]
    metrics = check_two_processes_match_one(tmp_path, "lora_hf.yaml", "pp", options)
    assert metrics["train_loss"][-1] < metrics["train_loss"][0] - 0.01
    (checkpoint,) = (tmp_path / "two").glob("lora_hf/version_0/checkpoints/step3-*.ckpt")
    main(["convert", str(checkpoint), str(tmp_path / "adapter")])
    assert peft.LoraConfig.from_pretrained(tmp_path / "adapter").r == 4


@pytest.mark.slow
@reading
def test_preference_pairs_train_on_two_processes_as_on_one(tmp_path: Path, reading: str) -> None:
    pytest.importorskip("transformers")
    options = options_of(tmp_path, preferences(12), preferences(5, seed=2), 4)
    options += ["--model.learning_rate=0.003", "--model.warmup_steps=0", *READING[reading]]
    metrics = check_two_processes_match_one(tmp_path, "dpo_hf.yaml", "tp", options)
    check_encoded_before(tmp_path, reading)
    assert metrics["train_loss"][-1] < metrics["train_loss"][0] - 0.01
