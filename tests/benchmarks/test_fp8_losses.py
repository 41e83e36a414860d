"""The comparison of losses in 8 bits trains, and its table compares all recipes with the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fp8_losses import Losses, draw, table, train
from lightning_megatron import TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.data.tokenizer import ByteTokenizer
from tests.world import run_world

TINY = {"vocab_size": 320, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_seq_length": 16}


def test_the_table_compares_parts_of_trainings_with_the_first_recipe() -> None:
    first = Losses("bf16", [4.0, 2.0, 2.0, 2.0], [(2, 2.5), (4, 2.0)])
    second = Losses("rowwise", [4.0, 4.0, 1.0, 2.0], [(2, 2.5), (4, 2.1)])
    assert table([first, second])[2:] == [
        "| bf16 | 2 | 2.5000 | +0.00% | 3.0000 | +0.00% |",
        "| bf16 | 4 | 2.0000 | +0.00% | 2.0000 | +0.00% |",
        "| rowwise | 2 | 2.5000 | +0.00% | 4.0000 | +33.33% |",
        "| rowwise | 4 | 2.1000 | +5.00% | 1.5000 | -25.00% |",
    ]


def write_text(folder: Path) -> str:
    """Write a token file, and return its prefix."""
    prefix = str(folder / "text")
    with TokenFileWriter(prefix, tokenizer=ByteTokenizer()) as writer:
        writer.add_document(ByteTokenizer().encode("We the people of the United States. " * 40))
    return prefix


def test_a_training_records_every_loss(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prefix = write_text(tmp_path)
    data = TokenDataModule(train=prefix, val=prefix, seq_length=16, batch_size=8)
    options = {"accelerator": "cpu", "default_root_dir": str(tmp_path)}
    saved = tmp_path / "bf16.json"
    losses = train("bf16", 8, data, TINY, options, path=saved)
    assert json.loads(saved.read_text())["train"] == losses.train
    assert len(losses.train) == 8
    assert [steps for steps, _ in losses.held_out] == [*range(1, 9)]
    assert losses.train[0] > losses.train[-1] > 0
    draw([losses], tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 1000


def train_divided(rank: int, size: int, prefix: str, folder: str) -> Losses:
    """Train under tensor parallelism with two microbatches."""
    data = TokenDataModule(train=prefix, val=prefix, seq_length=16, batch_size=8)
    options = {"accelerator": "cpu", "default_root_dir": folder}
    return train("bf16", 4, data, TINY, options, {"tp": size, "microbatch_size": 4})


def test_a_layout_has_the_losses_of_one_process(tmp_path: Path) -> None:
    prefix = write_text(tmp_path)
    alone = train_divided(0, 1, prefix, str(tmp_path))
    for losses in run_world(train_divided, 2, prefix, str(tmp_path)):
        assert losses.train == pytest.approx(alone.train, rel=1e-3)
        assert [steps for steps, _ in losses.held_out] == [1, 2, 3, 4]
        assert losses.held_out[-1][1] == pytest.approx(alone.held_out[-1][1], rel=1e-3)
