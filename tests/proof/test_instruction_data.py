"""Packed conversations train as each of them alone: the loss is the mean over the answers' tokens
of all conversations, in every layout.
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
    found = {}
    for name, layout in LAYOUTS.items():
        strategy = MegatronStrategy(microbatch_size=1, **layout)
        found[name] = train(folder, rows, strategy, size)
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write a small Llama with a template, and conversations."""
    folder = tmp_path_factory.mktemp("chat")
    return save_chat_llama(folder / "model"), write_lines(folder / "a.jsonl", conversations(40))


@pytest.fixture(scope="module")
def whole(places: tuple[str, str]) -> list[float]:
    """Train in this process under the strategy."""
    return train(*places, MegatronStrategy(), 1)


def test_the_loss_of_packed_rows_is_that_of_single_conversations(places, whole):
    folder, _ = places
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in conversations(40):
        found = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        # A row has room for one more token than it predicts, as a label.
        tokens = torch.tensor(found["input_ids"])[: LENGTH + 1]
        wanted = torch.tensor(found["assistant_masks"])[: LENGTH + 1][1:].bool()
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits[wanted], tokens[1:][wanted], reduction="sum"))
        count += int(wanted.sum())
    # Hugging Face's norms compute in float32.
    assert whole[0] == pytest.approx(total / count, rel=0, abs=1e-7)
    assert whole[1] < whole[0] - 0.01


def test_plain_transformers_keep_packed_conversations_apart_too(places, whole):
    # Hugging Face's model computes losses in float32.
    assert train(*places, "auto", 1) == pytest.approx(whole, rel=0, abs=1e-5)


def test_rows_of_one_conversation_have_the_same_loss(places, whole):
    alone = train(*places, MegatronStrategy(), 1, packing=False)
    assert alone[0] == pytest.approx(whole[0], rel=0, abs=1e-10)


def test_layouts_train_alike(places, whole):
    for found in run_world(train_all, 2, *places):
        for name, losses in found.items():
            assert losses == pytest.approx(whole, rel=0, abs=1e-10), name
