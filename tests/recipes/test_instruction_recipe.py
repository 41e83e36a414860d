"""Recipes for conversations and for pairs train a small folder on two processes like on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_megatron.cli.main import main
from tests.chat_folder import conversations, preferences, save_chat_llama, write_lines
from tests.recipes.test_recipes import losses
from tests.sweeps import all_run


@pytest.mark.slow
@pytest.mark.skipif(not all_run(), reason="a sweep: pytest --sweeps")
def test_conversations_train_on_two_processes_like_on_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = [
        f"--model.path={save_chat_llama(tmp_path / 'model')}",
        f"--data.train={write_lines(tmp_path / 'a.jsonl', conversations(60))}",
        f"--data.val={write_lines(tmp_path / 'b.jsonl', conversations(20, seed=2))}",
        "--data.seq_length=250",
        "--data.global_batch_size=4",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
    ]
    layout = ["--trainer.devices=2", "--trainer.strategy.tp=2"]
    two = losses(tmp_path / "two", "sft_hf.yaml", options=[*options, *layout])
    options += ["--trainer.devices=1"]
    one = losses(tmp_path / "one", "sft_hf.yaml", options=options, starts=False)
    assert (len(two["train_loss"]), len(two["val_loss"])) == (3, 1)
    for name in ("train_loss", "val_loss"):
        assert two[name] == pytest.approx(one[name], abs=2e-4), name


@pytest.mark.slow
def test_adapters_train_on_two_processes_like_on_one_and_become_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    options = [
        f"--model.path={save_chat_llama(tmp_path / 'model')}",
        "--model.lora.r=4",
        "--model.learning_rate=0.01",
        "--model.warmup_steps=0",
        f"--data.train={write_lines(tmp_path / 'a.jsonl', conversations(30))}",
        f"--data.val={write_lines(tmp_path / 'b.jsonl', conversations(10, seed=2))}",
        "--data.seq_length=250",
        "--data.global_batch_size=2",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
    ]
    layout = ["--trainer.devices=2", "--trainer.strategy.pp=2"]
    two = losses(tmp_path / "two", "lora_hf.yaml", options=[*options, *layout])
    options += ["--trainer.devices=1"]
    one = losses(tmp_path / "one", "lora_hf.yaml", options=options, starts=False)
    assert (len(two["train_loss"]), len(two["val_loss"])) == (3, 1)
    assert two["train_loss"][-1] < two["train_loss"][0] - 0.01
    for name in ("train_loss", "val_loss"):
        assert two[name] == pytest.approx(one[name], abs=2e-4), name
    (checkpoint,) = (tmp_path / "two").glob("lora_hf/version_0/checkpoints/step3-*.ckpt")
    main(["convert", str(checkpoint), str(tmp_path / "adapter")])
    assert peft.LoraConfig.from_pretrained(tmp_path / "adapter").r == 4


@pytest.mark.slow
def test_pairs_train_on_two_processes_like_on_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = [
        f"--model.path={save_chat_llama(tmp_path / 'model')}",
        "--model.learning_rate=0.003",
        "--model.warmup_steps=0",
        f"--data.train={write_lines(tmp_path / 'a.jsonl', preferences(12))}",
        f"--data.val={write_lines(tmp_path / 'b.jsonl', preferences(5, seed=2))}",
        "--data.seq_length=250",
        "--data.global_batch_size=4",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
    ]
    layout = ["--trainer.devices=2", "--trainer.strategy.tp=2"]
    two = losses(tmp_path / "two", "dpo_hf.yaml", options=[*options, *layout])
    options += ["--trainer.devices=1"]
    one = losses(tmp_path / "one", "dpo_hf.yaml", options=options, starts=False)
    assert (len(two["train_loss"]), len(two["val_loss"])) == (3, 1)
    assert two["train_loss"][-1] < two["train_loss"][0] - 0.01
    for name in ("train_loss", "val_loss"):
        assert two[name] == pytest.approx(one[name], abs=2e-4), name
