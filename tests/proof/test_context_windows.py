"""Tests that documents in windows of the data module need no keys of other ranks, and train as in
one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_megatron import CausalLM, GPTConfig, MegatronStrategy, TokenDataModule
from tests.data.test_samples import write
from tests.strategy.graph_fits import Fit, Watch
from tests.world import run_world

V, S = 77, 16


def train(folder: Path, devices: int, context_windows: int, layout: dict[str, Any]) -> Fit:
    """Train for four steps of 3 rows, in microbatches of 1 row."""
    seed_everything(3, verbose=False)
    record = Fit("")
    config = GPTConfig.llama(
        vocab_size=V, max_seq_length=S, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2,
        ffn_hidden_size=24, vocab_multiple=1,
    )  # fmt: skip
    data = TokenDataModule(
        str(folder / "corpus"), tokenizer=None, seq_length=S, batch_size=3, documents="whole",
        context_windows=context_windows,
    )  # fmt: skip
    Trainer(
        accelerator="cpu", devices=devices, strategy=MegatronStrategy(microbatch_size=1, **layout),
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Watch(record)], max_steps=4,
    ).fit(CausalLM(config, learning_rate=0.01, warmup_steps=0), data)  # fmt: skip
    return record


def run_all(rank: int, size: int, folder: Path) -> list[Fit]:
    """Train with and without windows, by groups and by all ranks."""
    layout = {"cp": size, "cp_transport": "ring"}
    return [
        train(folder, size, windows, {**layout, "cp_groups": groups})
        for windows, groups in ((2, "documents"), (2, "all"), (1, "documents"))
    ]


def counts_over_cp(fit: Fit) -> int:
    """Return how often a rank communicated with ranks that share its rows."""
    return sum(number for axis, number in fit.counts.items() if axis.startswith("cp"))


def test_rows_with_windows_train_as_in_one_process(tmp_path: Path) -> None:
    lengths = [7, 3, 6, 5, 8, 4, 2, 5, 7, 3, 6, 8]
    corpus = write(tmp_path / "corpus", lengths)
    assert int(corpus.tokens.max()) < V
    twin = train(tmp_path, 1, 2, {})
    for windows, all_ranks, crossing in run_world(run_all, 2, tmp_path):
        for fit in (windows, all_ranks):
            for key, weight in fit.weights.items():
                torch.testing.assert_close(weight, twin.weights[key], rtol=0, atol=1e-10)
            if fit.losses:
                losses = torch.tensor(fit.losses), torch.tensor(twin.losses)
                torch.testing.assert_close(*losses, rtol=0, atol=1e-10)
        # Only rows without windows have documents that ranks must share.
        assert counts_over_cp(windows) < counts_over_cp(crossing) <= counts_over_cp(all_ranks)
    assert len(set(twin.losses)) == 4
