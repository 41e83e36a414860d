"""Training on conversations: packed rows train as single conversations, in every layout with the
mean loss over the tokens of all answers, and streamed files continue in another layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.nn import functional as F

from lightning_megatron import ChatDataModule, HuggingFaceCausalLM, Streaming
from tests.chat_folder import conversations, save_chat_llama, write_lines
from tests.fits import Job, Record, trainer_of
from tests.sweeps import chosen
from tests.world import run_world

transformers = pytest.importorskip("transformers")

LENGTH, ROWS = 250, 24
ONE = {"microbatch_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "dp2": {}, "pp2": {"pp": 2}}
BY_STEPS: dict[str, Any] = {"max_steps": 4, "max_epochs": -1}
BY_PASSES: dict[str, Any] = {"max_steps": -1, "max_epochs": 2}
#: Layout that writes a checkpoint, and layout that continues from it.
CHANGES = chosen(
    [(saver, follower) for saver in LAYOUTS for follower in LAYOUTS if saver != follower],
    ("dp2", "pp2"),
)


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


def train_streamed(
    root: Path, layout: Mapping[str, Any], size: int, limits: Mapping[str, Any],
    save: str = "", resume: str | None = None,
) -> list[float]:  # fmt: skip
    """Return the loss of each step."""
    seed_everything(1, verbose=False)
    data = ChatDataModule(
        [str(root / name) for name in ("a.jsonl", "b.jsonl")], str(root / "model"),
        seq_length=LENGTH, global_batch_size=4, streaming=Streaming(7),
    )  # fmt: skip
    record = Record()
    trainer = trainer_of(
        Job(strategy=layout, trainer={**limits, "gradient_clip_val": None}), size, record
    )
    module = HuggingFaceCausalLM(str(root / "model"), learning_rate=0.01, schedule="constant")
    with warnings.catch_warnings():
        # Lightning recommends workers, and asks for `weights_only` of its own checkpoints.
        warnings.simplefilter("ignore")
        trainer.fit(module, data, ckpt_path=root / resume if resume else None)
        if save:
            trainer.save_checkpoint(root / save)
    return record.report.losses


def run_all(rank: int, size: int, root: Path) -> dict[str, list[float]]:
    losses = {}
    for name, layout in LAYOUTS.items():
        losses[f"{name}, packed"] = train_packed(root, {**ONE, **layout}, size)
    for saver, follower in CHANGES:
        way = f"{saver}-{follower}"
        half = {**BY_STEPS, "max_steps": 2}
        begun = train_streamed(root, {**ONE, **LAYOUTS[saver]}, size, half, way)
        layout = {**ONE, **LAYOUTS[follower]}
        losses[way] = begun + train_streamed(root, layout, size, BY_STEPS, resume=way)
    losses["passes"] = train_streamed(root, {**ONE, "pp": 2}, size, BY_PASSES)
    return losses


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Llama with a template, and conversations in one file and in two."""
    path, rows = tmp_path_factory.mktemp("chat"), conversations(ROWS)
    save_chat_llama(path / "model")
    for name, part in (("all", rows), ("a", rows[:10]), ("b", rows[10:])):
        write_lines(path / f"{name}.jsonl", part)
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


def test_transformers_without_the_strategy_separates_packed_conversations(root: Path) -> None:
    # Hugging Face's model computes losses in float32.
    assert train_packed(root, None) == pytest.approx(expected(root), rel=0, abs=1e-5)


def test_rows_of_one_conversation_have_the_loss_of_packed_rows(root: Path) -> None:
    unpacked = train_packed(root, {}, packing=False)
    assert unpacked[0] == pytest.approx(expected(root)[0], rel=0, abs=1e-10)


def test_every_layout_trains_on_packed_rows_as_one_process(root: Path, ranks: Any) -> None:
    for losses in ranks:
        for name in LAYOUTS:
            assert losses[f"{name}, packed"] == pytest.approx(expected(root), rel=0, abs=1e-10)


def test_layouts_train_on_streams_as_one_process_and_continue_each_others_checkpoints(
    root: Path, ranks: Any
) -> None:
    by_steps = train_streamed(root, {}, 1, BY_STEPS)
    by_passes = train_streamed(root, {}, 1, BY_PASSES)
    assert len(by_steps) == 4 < len(by_passes)
    assert by_passes[:4] == by_steps
    for losses in ranks:
        assert losses["passes"] == pytest.approx(by_passes, rel=0, abs=1e-10)
        for saver, follower in CHANGES:
            assert losses[f"{saver}-{follower}"] == pytest.approx(by_steps, rel=0, abs=1e-10)
