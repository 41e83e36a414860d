"""Tests that data ranks and resumes do not change the losses of a global batch."""

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


class Recorder(pl.Callback):
    """Record losses and graphs of all steps, and save a checkpoint after some steps."""

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
    """Module that records the samples of each microbatch."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.rows.append(len(batch["tokens"]))
        return super().training_step(batch, batch_idx)


def make_data(corpus: str, ramp_up: RampUp | None = RAMP, **options: Any) -> TokenDataModule:
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
) -> tuple[Recorder, list[int]]:
    strategy = MegatronStrategy(
        **{"microbatch_size": 2, "check_microbatches": False, **(layout or {})}, cuda_graphs=graphs
    )
    if graphs is not None:
        strategy._make_backend = lambda mesh: TapeBackend(mesh.launcher)
    # A captured step must not change attributes.
    recorder, module = Recorder(saved), Module(CONFIG) if graphs else Counted()
    trainer = trainer_of(strategy, recorder, devices=devices)
    trainer.fit(module, datamodule=make_data(corpus, **options), ckpt_path=resumed)
    return recorder, getattr(module, "rows", [])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    generator = torch.Generator().manual_seed(2)
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for _ in range(60):
            writer.add_document(torch.randint(VOCABULARY, (10,), generator=generator).numpy())
    return str(prefix)


@pytest.fixture(scope="module")
def expected_losses(corpus: str) -> list[float]:
    """Return losses of ordinary Lightning with batches of SIZES."""
    source = TokenDataModule(corpus, seq_length=LENGTH, train_samples=sum(SIZES))
    rows = list(source.train_dataloader())
    batches = []
    for size in SIZES:
        samples, rows = rows[:size], rows[size:]
        batches.append({name: torch.cat([row[name] for row in samples]) for name in samples[0]})
    recorder = Recorder()
    trainer_of("auto", recorder).fit(Counted(), DataLoader(batches, batch_size=None))
    return recorder.losses


def _fit_on_two_ranks(
    rank: int, size: int, corpus: str, folder: str, checkpoint_of_one: str
) -> dict[str, Any]:
    saved = os.path.join(folder, "two")
    return {
        "dp2": fit(corpus, 2, saved=saved)[0].losses,
        "dp1 to dp2": fit(corpus, 2, resumed=checkpoint_of_one)[0].losses,
        "pp2": fit(corpus, 2, {"pp": 2})[0].losses,
    }


def _assert_close(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) > 0
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-11)


def test_losses_match_one_process_also_after_a_resume(
    corpus: str, expected_losses: list[float], tmp_path: Path
) -> None:
    checkpoint_of_one = str(tmp_path / "one")
    recorder, rows = fit(corpus, saved=checkpoint_of_one)
    _assert_close(recorder.losses, expected_losses)
    assert rows == [2] * (sum(SIZES) // 2)
    for losses in run_world(_fit_on_two_ranks, 2, corpus, str(tmp_path), checkpoint_of_one):
        _assert_close(losses["dp2"], expected_losses)
        _assert_close(losses["pp2"], expected_losses)
        _assert_close(losses["dp1 to dp2"], expected_losses[SAVED_AFTER:])
    _assert_close(
        fit(corpus, resumed=str(tmp_path / "two"))[0].losses, expected_losses[SAVED_AFTER:]
    )


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_graphs_are_captured_again_when_batches_grow(
    corpus: str, expected_losses: list[float], mode: Any
) -> None:
    recorder, _ = fit(corpus, graphs=CudaGraphs(mode, warmup_steps=1))
    _assert_close(recorder.losses, expected_losses)
    # One eager step at the start, and one wherever the batch grows. Graphs of full steps then warm
    # up.
    growing_steps = [step for step in range(1, STEPS) if SIZES[step] > SIZES[step - 1]]
    eager_steps = {0, *growing_steps} | (
        {step + 1 for step in growing_steps} if mode == "full" else set()
    )
    assert [step for step, number in enumerate(recorder.graphs) if not number] == sorted(
        eager_steps
    )


def test_the_ramp_up_counts_samples_over_all_epochs(corpus: str) -> None:
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
    # Epochs begin at samples 0, 30 and 60; the rest of an epoch is too small for a batch.
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
def test_unsupported_global_batches_are_refused_before_processes_start(
    corpus: str, options: Any, trainer: Any, error: type[Exception], message: str
) -> None:
    strategy = MegatronStrategy(**options)
    with pytest.raises(error, match=message):
        trainer_of(strategy, **trainer).fit(Counted(), datamodule=make_data(corpus))
    assert strategy._mesh is None
    with pytest.raises(UnsupportedError, match="optimizer step"):
        trainer_of("auto", accumulate_grad_batches=2).fit(Counted(), datamodule=make_data(corpus))
