"""Tests that packed conversations train as single ones: in every layout the loss is the mean over
the tokens of all answers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.nn import functional as F

from lightning_megatron import ChatDataModule, HuggingFaceCausalLM, MegatronStrategy
from tests.chat_folder import conversations, save_chat_llama, write_lines
from tests.world import run_world

transformers = pytest.importorskip("transformers")

LENGTH = 250
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2}}


def train(folder: str, rows: str, strategy: Any, devices: int, packing: bool = True) -> list[float]:
    """Return the validation losses before training and after two steps."""
    seed_everything(1, verbose=False)
    data = ChatDataModule(
        rows, folder, val=rows, seq_length=LENGTH, packing=packing, global_batch_size=4
    )
    trainer = Trainer(
        accelerator="cpu", devices=devices, precision="64-true", strategy=strategy, max_steps=2,
        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    module = HuggingFaceCausalLM(folder, learning_rate=0.01, schedule="constant")
    trainer.limit_val_batches = 1.0
    [before] = trainer.validate(module, data, verbose=False)
    trainer.limit_val_batches = 0
    trainer.fit(module, data)
    trainer.limit_val_batches = 1.0
    [after] = trainer.validate(module, data, verbose=False)
    return [before["val_loss"], after["val_loss"]]


def train_all(rank: int, size: int, folder: str, rows: str) -> dict[str, list[float]]:
    losses = {}
    for name, layout in LAYOUTS.items():
        strategy = MegatronStrategy(microbatch_size=1, **layout)
        losses[name] = train(folder, rows, strategy, size)
    return losses


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write a small Llama with a template, and conversations."""
    folder = tmp_path_factory.mktemp("chat")
    return save_chat_llama(folder / "model"), write_lines(folder / "a.jsonl", conversations(40))


@pytest.fixture(scope="module")
def expected(paths: tuple[str, str]) -> list[float]:
    """Train in this process under the strategy."""
    return train(*paths, MegatronStrategy(), 1)


def test_the_loss_of_packed_rows_matches_single_conversations(paths, expected):
    folder, _ = paths
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in conversations(40):
        encoding = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        # A row has one more token than predictions, because the last token is only a label.
        tokens = torch.tensor(encoding["input_ids"])[: LENGTH + 1]
        is_answer = torch.tensor(encoding["assistant_masks"])[: LENGTH + 1][1:].bool()
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits[is_answer], tokens[1:][is_answer], reduction="sum"))
        count += int(is_answer.sum())
    # Hugging Face's norms compute in float32.
    assert expected[0] == pytest.approx(total / count, rel=0, abs=1e-7)
    assert expected[1] < expected[0] - 0.01


def test_transformers_without_the_strategy_separates_packed_conversations(paths, expected):
    # Hugging Face's model computes losses in float32.
    assert train(*paths, "auto", 1) == pytest.approx(expected, rel=0, abs=1e-5)


def test_rows_of_one_conversation_have_the_loss_of_packed_rows(paths, expected):
    unpacked = train(*paths, MegatronStrategy(), 1, packing=False)
    assert unpacked[0] == pytest.approx(expected[0], rel=0, abs=1e-10)


def test_every_layout_trains_as_one_process(paths, expected):
    for reports in run_world(train_all, 2, *paths):
        for name, losses in reports.items():
            assert losses == pytest.approx(expected, rel=0, abs=1e-10), name
