"""Losses of a global batch depend neither on the number of data ranks nor on where a run resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CudaGraphs, GPTConfig, MegatronStrategy, RampUp, TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.graphs.tape import TapeBackend
from tests.proof.training import VOCABULARY, Module
from tests.world import run_world

LENGTH = 8
STEPS = 9
SAVED_AFTER = 4
#: Sizes of the batches of RAMP: 4 from sample 0 on, 8 from 12 and 12 from 24.
RAMP, SIZES = RampUp(4, 4, 24), [4, 4, 4, 8, 8, 12, 12, 12, 12]
CONFIG = GPTConfig.gpt2(
    vocab_size=VOCABULARY, max_seq_length=LENGTH, num_layers=2, hidden_size=16, num_heads=2
)


class Note(pl.Callback):
    """Note losses, microbatches and graphs of all steps, and save after some."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.losses: list[float] = []
        self.graphs: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy) and strategy.run.graphs is not None:
            self.graphs.append(strategy.run.graphs.num_graphs)
        if self.path is not None and trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


class Counted(Module):
    """Module that notes the samples of each microbatch."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.rows.append(len(batch["tokens"]))
        return super().training_step(batch, batch_idx)


def data(corpus: str, ramp_up: RampUp | None = RAMP, **options: Any) -> TokenDataModule:
    return TokenDataModule(
        corpus, seq_length=LENGTH, global_batch_size=12, ramp_up=ramp_up, **options
    )


def trainer_of(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": STEPS, "max_epochs": -1, "devices": 1, **options},
    )


def fit(
    corpus: str,
    devices: int = 1,
    layout: dict[str, Any] | None = None,
    saved: str | None = None,
    resumed: str | None = None,
    graphs: CudaGraphs | None = None,
    **options: Any,
) -> tuple[Note, list[int]]:
    strategy = MegatronStrategy(
        **{"microbatch_size": 2, "check_microbatches": False, **(layout or {})}, cuda_graphs=graphs
    )
    if graphs is not None:
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    # A captured step must not change attributes.
    note, module = Note(saved), Module(CONFIG) if graphs else Counted()
    trainer = trainer_of(strategy, note, devices=devices)
    trainer.fit(module, datamodule=data(corpus, **options), ckpt_path=resumed)
    return note, getattr(module, "rows", [])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    generator = torch.Generator().manual_seed(2)
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for _ in range(60):
            writer.add_document(torch.randint(VOCABULARY, (10,), generator=generator).numpy())
    return str(prefix)


@pytest.fixture(scope="module")
def whole(corpus: str) -> list[float]:
    """Losses of ordinary Lightning, fed with batches of the sizes that stand above."""
    source = TokenDataModule(corpus, seq_length=LENGTH, train_samples=sum(SIZES))
    rows = list(source.train_dataloader())
    batches = []
    for size in SIZES:
        taken, rows = rows[:size], rows[size:]
        batches.append({name: torch.cat([row[name] for row in taken]) for name in taken[0]})
    note = Note()
    trainer_of("auto", note).fit(Counted(), DataLoader(batches, batch_size=None))
    return note.losses


def _in_two(rank: int, size: int, corpus: str, folder: str, from_one: str) -> dict[str, Any]:
    saved = os.path.join(folder, "two")
    return {
        "dp2": fit(corpus, 2, saved=saved)[0].losses,
        "dp1 to dp2": fit(corpus, 2, resumed=from_one)[0].losses,
        "pp2": fit(corpus, 2, {"pp": 2})[0].losses,
    }


def _close(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) > 0
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-11)


def test_losses_are_those_of_one_process(corpus: str, whole: list[float], tmp_path: Path) -> None:
    one = str(tmp_path / "one")
    note, rows = fit(corpus, saved=one)
    _close(note.losses, whole)
    assert rows == [2] * (sum(SIZES) // 2)
    for found in run_world(_in_two, 2, corpus, str(tmp_path), one):
        _close(found["dp2"], whole)
        _close(found["pp2"], whole)
        _close(found["dp1 to dp2"], whole[SAVED_AFTER:])
    _close(fit(corpus, resumed=str(tmp_path / "two"))[0].losses, whole[SAVED_AFTER:])


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_graphs_are_captured_again_when_batches_grow(
    corpus: str, whole: list[float], mode: Any
) -> None:
    note, _ = fit(corpus, graphs=CudaGraphs(mode, warmup_steps=1))
    _close(note.losses, whole)
    # One eager step at the start, and one wherever the batch has grown. Whole steps then warm up.
    grown = [at for at in range(1, STEPS) if SIZES[at] > SIZES[at - 1]]
    eager = {0, *grown} | ({at + 1 for at in grown} if mode == "full" else set())
    assert [at for at, number in enumerate(note.graphs) if not number] == sorted(eager)


def test_a_run_by_epochs_counts_samples_over_all_of_them(corpus: str) -> None:
    class Sizes(Counted):
        validated = 0

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.validated += 1

    module = Sizes()
    source = TokenDataModule(
        corpus,
        corpus,
        seq_length=LENGTH,
        global_batch_size=12,
        ramp_up=RAMP,
        train_samples=30,
    )
    trainer = trainer_of(
        "auto", max_steps=-1, max_epochs=3, limit_val_batches=1, num_sanity_val_steps=0
    )
    trainer.fit(module, datamodule=source)
    # Epochs begin at samples 0, 30 and 60; what is left of one is too little for a batch.
    assert module.rows == [4, 4, 4, 8, 8] + [12, 12] + [12, 12]
    assert module.validated == 3


@pytest.mark.parametrize(
    ("options", "trainer", "error", "message"),
    [
        ({"microbatch_size": 8}, {}, ParallelPlanError, "each size of ramp_up .*Use 8"),
        ({"pp": 2}, {"devices": 2}, ParallelPlanError, "number of samples that divides 4"),
        ({}, {"accumulate_grad_batches": 2}, UnsupportedError, "optimizer step"),
        ({}, {"devices": 8}, ParallelPlanError, "4 is not one of 8 x 1 = 8"),
    ],
)
def test_what_cannot_be_is_refused_before_processes_start(
    corpus: str, options: Any, trainer: Any, error: type[Exception], message: str
) -> None:
    strategy = MegatronStrategy(**options)
    with pytest.raises(error, match=message):
        trainer_of(strategy, **trainer).fit(Counted(), datamodule=data(corpus))
    assert strategy._mesh is None
    with pytest.raises(UnsupportedError, match="optimizer step"):
        trainer_of("auto", accumulate_grad_batches=2).fit(Counted(), datamodule=data(corpus))
