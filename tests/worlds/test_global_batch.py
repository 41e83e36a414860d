"""Data ranks, resumes and captured graphs do not change the losses of a global batch, which may grow
during training.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CudaGraphs, GPTConfig, RampUp, TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from tests.fits import Job, Language, Record, Report, trainer_of
from tests.world import run_world

LENGTH, V, SAVED_AFTER = 8, 60, 4
#: Sizes of the batches of RAMP: 4 from sample 0 on, 8 from 12 and 12 from 24.
RAMP, SIZES = RampUp(4, 4, 24), [4, 4, 4, 8, 8, 12, 12]
CONFIG = GPTConfig.gpt2(
    vocab_size=V, max_seq_length=LENGTH, num_layers=2, hidden_size=16, num_heads=2
)


class Counted(Language):
    """Module that records the samples of each microbatch."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.rows: list[int] = []
        self.validated = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.rows.append(len(batch["tokens"]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated += 1


def data_of(corpus: str, **options: Any) -> TokenDataModule:
    return TokenDataModule(
        corpus, seq_length=LENGTH, **{"global_batch_size": 12, "ramp_up": RAMP, **options}
    )


def fit(
    data: Any, layout: dict[str, Any] | None, size: int = 1, steps: int = len(SIZES),
    save: str = "", resume: str | None = None, **options: Any,
) -> tuple[Report, Counted]:  # fmt: skip
    limits = {"max_epochs": -1, "gradient_clip_val": None, **options}
    record, module = Record(), Counted()
    trainer = trainer_of(Job(strategy=layout, steps=steps, trainer=limits), size, record)
    # A captured step must not change attributes.
    fitted = Language(CONFIG) if layout and "cuda_graphs" in layout else module
    trainer.fit(fitted, data, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return record.report, module


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    generator = torch.Generator().manual_seed(2)
    with TokenFileWriter(prefix, dtype="i4") as writer:
        for _ in range(60):
            writer.add_document(torch.randint(V, (10,), generator=generator).numpy())
    return str(prefix)


@cache
def expected_losses(corpus: str) -> list[float]:
    """Return losses of ordinary Lightning with batches of SIZES."""
    source = TokenDataModule(corpus, seq_length=LENGTH, train_samples=sum(SIZES))
    rows = list(source.train_dataloader())
    batches: Any = []
    for size in SIZES:
        samples, rows = rows[:size], rows[size:]
        batches.append({name: torch.cat([row[name] for row in samples]) for name in samples[0]})
    return fit(DataLoader(batches, batch_size=None), None)[0].losses


def run_two(rank: int, size: int, corpus: str, saved: str, saved_by_one: str) -> dict[str, Any]:
    found = {
        "begun": fit(data_of(corpus), {}, size, SAVED_AFTER, saved),
        "dp2": fit(data_of(corpus), {}, size, resume=saved),
        "from one": fit(data_of(corpus), {}, size, resume=saved_by_one),
        "pp2": fit(data_of(corpus), {"pp": 2}, size),
    }
    return {name: report.losses for name, (report, _) in found.items()}


def test_losses_match_one_process_also_after_a_resume(corpus: str, tmp_path: Path) -> None:
    saved, saved_by_one = str(tmp_path / "two"), str(tmp_path / "one")
    expected = pytest.approx(expected_losses(corpus), rel=0, abs=1e-11)
    later = pytest.approx(expected_losses(corpus)[SAVED_AFTER:], rel=0, abs=1e-11)
    fit(data_of(corpus), {}, steps=SAVED_AFTER, save=saved_by_one)
    report, module = fit(data_of(corpus), {})
    assert report.losses == expected
    assert module.rows == [2] * (sum(SIZES) // 2)
    for losses in run_world(run_two, 2, corpus, saved, saved_by_one):
        assert losses["begun"] + losses["dp2"] == expected
        assert losses["pp2"] == expected
        assert losses["from one"] == later
    assert fit(data_of(corpus), {}, resume=saved)[0].losses == later


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_graphs_are_captured_again_when_batches_grow(corpus: str, mode: Any) -> None:
    report, _ = fit(data_of(corpus), {"cuda_graphs": CudaGraphs(mode, warmup_steps=1)})
    assert report.losses == pytest.approx(expected_losses(corpus), rel=0, abs=1e-11)
    # One eager step at the start, and one wherever the batch grows. Graphs of full steps then warm
    # up.
    growing = [step for step in range(1, len(SIZES)) if SIZES[step] > SIZES[step - 1]]
    eager = {0, *growing} | ({step + 1 for step in growing} if mode == "full" else set())
    assert [step for step, number in enumerate(report.graphs) if not number] == sorted(eager)


def test_the_ramp_up_counts_samples_over_all_epochs(corpus: str) -> None:
    limits = {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    data = TokenDataModule(
        corpus, corpus, seq_length=LENGTH, global_batch_size=12, ramp_up=RAMP, train_samples=30
    )
    _, module = fit(data, None, steps=-1, **limits)
    # Epochs begin at samples 0, 30 and 60; the rest of an epoch is too small for a batch.
    assert module.rows == [4, 4, 4, 8, 8] + [12, 12] + [12, 12]
    assert module.validated == 3


def test_unsupported_global_batches_are_refused_before_processes_start(corpus: str) -> None:
    for options, size, limits, error, message in (
        ({"microbatch_size": 8}, 1, {}, ParallelPlanError, "each size of ramp_up .*Use 8"),
        ({"pp": 2, "microbatch_size": None}, 2, {}, ParallelPlanError, "samples that divides 4"),
        ({}, 1, {"accumulate_grad_batches": 2}, UnsupportedError, "optimizer step"),
        ({"microbatch_size": 1}, 8, {}, ParallelPlanError, "4 is not one of 8 x 1 = 8"),
    ):
        trainer: Any = trainer_of(Job(strategy=options, trainer=limits), size)  # type: ignore[arg-type]
        with pytest.raises(error, match=message):
            trainer.fit(Counted(), datamodule=data_of(corpus))
        assert trainer.strategy._mesh is None
    with pytest.raises(UnsupportedError, match="optimizer step"):
        fit(data_of(corpus), None, accumulate_grad_batches=2)
