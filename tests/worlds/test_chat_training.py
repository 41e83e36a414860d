"""Training on conversations: packed rows train as single conversations, in every layout with the
mean loss over the tokens of all answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_megatron import HuggingFaceCausalLM
from lightning_megatron.tasks.chat import ChatDataModule
from tests.fits import Job, trainer_of
from tests.tasks.chat.chat_folder import conversations, save_chat_llama, write_lines
from tests.world import run_world

transformers = pytest.importorskip("transformers")

LENGTH, ROWS = 250, 24
ONE = {"microbatch_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, **ONE},
    "dp2": ONE,
    "pp2": {"pp": 2, **ONE},
}


def train_packed(
    root: Path, layout: Mapping[str, Any] | None, size: int = 1, packing: bool = True
) -> list[float]:
    """Return the validation losses before training and after two steps."""
    rows = str(root / "all.jsonl")
    data = ChatDataModule(
        rows, str(root / "model"), val=rows, seq_length=LENGTH, packing=packing, global_batch_size=4
    )
    limits = {"max_epochs": -1, "limit_val_batches": 0, "gradient_clip_val": None}
    trainer = trainer_of(Job(strategy=layout, steps=2, trainer=limits), size)
    module = HuggingFaceCausalLM(str(root / "model"), learning_rate=0.01, schedule="constant")
    losses = []
    for is_trained in (False, True):
        if is_trained:
            trainer.limit_val_batches = 0
            trainer.fit(module, data)
        trainer.limit_val_batches = 1.0
        [metrics] = trainer.validate(module, data, verbose=False)
        losses.append(metrics["val_loss"])
    return losses


def run_all(rank: int, size: int, root: Path) -> dict[str, list[float]]:
    return {name: train_packed(root, layout, size) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Llama with a template, and conversations."""
    path = tmp_path_factory.mktemp("chat")
    save_chat_llama(path / "model")
    write_lines(path / "all.jsonl", conversations(ROWS))
    return path


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, list[float]]]:
    return run_world(run_all, 2, root)


@cache
def expected(root: Path) -> list[float]:
    return train_packed(root, {})


def test_the_loss_of_packed_rows_matches_single_conversations(root: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "model")
    total, count = 0.0, 0
    for row in conversations(ROWS):
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
    assert expected(root)[0] == pytest.approx(total / count, rel=0, abs=1e-7)
    assert expected(root)[1] < expected(root)[0] - 0.01


def test_layouts_and_other_ways_train_on_packed_rows_as_one_process(root: Path, ranks: Any) -> None:
    for losses in ranks:
        for name in LAYOUTS:
            assert losses[name] == pytest.approx(expected(root), rel=0, abs=1e-10)
    # Hugging Face's model separates packed conversations, and computes losses in float32.
    assert train_packed(root, None) == pytest.approx(expected(root), rel=0, abs=1e-5)
    unpacked = train_packed(root, {}, packing=False)
    assert unpacked[0] == pytest.approx(expected(root)[0], rel=0, abs=1e-10)
