"""Data ranks, resumes and captured graphs do not change the losses of a global batch, which may grow
during training.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import CudaGraphs, GPTConfig, RampUp, TokenDataModule
from lightning_megatron.data.token_file import TokenFileWriter
from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from tests.fits import Job, Language, Record, run_job, run_jobs_on, trainer_of
from tests.forecast.speeds import content

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
        self.outcomes["rows"] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.outcomes["rows"].append(len(batch["tokens"]))
        return super().training_step(batch, batch_idx)


def job(
    corpus: str, layout: dict[str, Any] | None, model: Any = Counted, steps: int = len(SIZES),
    limits: Any = None, **paths: str,
) -> Job:  # fmt: skip
    data = partial(TokenDataModule, corpus, seq_length=LENGTH, global_batch_size=12, ramp_up=RAMP)
    trainer = {"max_epochs": -1, "gradient_clip_val": None, **(limits or {})}
    return Job(model, layout, steps=steps, trainer=trainer, data=data, **paths)  # type: ignore[arg-type]


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
    record = Record()
    trainer = trainer_of(job(corpus, None), 1, record)
    trainer.fit(Language(CONFIG), DataLoader(batches, batch_size=None))
    return record.report.losses


def test_losses_match_one_process_also_after_a_resume(corpus: str, tmp_path: Path) -> None:
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    expected = pytest.approx(expected_losses(corpus), rel=0, abs=1e-11)
    later = pytest.approx(expected_losses(corpus)[SAVED_AFTER:], rel=0, abs=1e-11)
    run_job(job(corpus, {}, steps=SAVED_AFTER, save=one))
    report = run_job(job(corpus, {}))
    assert report.losses == expected
    assert report.outcomes["rows"] == [2] * (sum(SIZES) // 2)
    jobs = {
        "begun": job(corpus, {}, steps=SAVED_AFTER, save=two),
        "dp2": job(corpus, {}, resume=two),
        "from one": job(corpus, {}, resume=one),
        "pp2": job(corpus, {"pp": 2}),
    }
    reports = run_jobs_on(2, jobs)
    for rank in range(2):
        begun, dp2, from_one, pp2 = (reports[name][rank].losses for name in jobs)
        assert begun + dp2 == expected
        assert pp2 == expected
        assert from_one == later
    assert run_job(job(corpus, {}, resume=two)).losses == later


def test_a_chosen_layout_trains_as_one_process(corpus: str, tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.json"
    speeds.write_text(json.dumps(content(gpu="cpu")))
    auto = {"layout": {"speeds": str(speeds), "memory": 4}}
    jobs = {"auto": job(corpus, auto), "pp2": job(corpus, {"pp": 2, **auto})}
    expected = pytest.approx(expected_losses(corpus), rel=0, abs=1e-11)
    reports = run_jobs_on(2, jobs)
    for name in jobs:
        assert [report.losses for report in reports[name]] == [expected] * 2
    small = {"layout": {"speeds": str(speeds), "memory": 1e-6}}
    for options, words in (
        (small, r"no layout of 1 devices fits into 0.0 GiB of each. The nearest is .* lack"),
        ({"layout": "auto"}, r"speeds of the GPU 'cpu' are not known(.|\n)*--calibrate"),
    ):
        with pytest.raises((ParallelPlanError, UnsupportedError), match=words):
            run_job(job(corpus, options))
    of_ranks = partial(TokenDataModule, corpus, seq_length=LENGTH, batch_size=2)
    with pytest.raises(UnsupportedError, match="needs a data module with a global batch size"):
        run_job(replace(job(corpus, auto), data=of_ranks))


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_graphs_are_captured_again_when_batches_grow(corpus: str, mode: Any) -> None:
    # A captured step must not change attributes.
    report = run_job(job(corpus, {"cuda_graphs": CudaGraphs(mode, warmup_steps=1)}, CONFIG))
    assert report.losses == pytest.approx(expected_losses(corpus), rel=0, abs=1e-11)
    # One eager step at the start, and one wherever the batch grows. Graphs of full steps then warm
    # up.
    growing = [step for step in range(1, len(SIZES)) if SIZES[step] > SIZES[step - 1]]
    eager = {0, *growing} | ({step + 1 for step in growing} if mode == "full" else set())
    assert [step for step, number in enumerate(report.graphs) if not number] == sorted(eager)


def test_unsupported_global_batches_are_refused_before_processes_start(corpus: str) -> None:
    for options, size, limits, error, message in (
        ({"microbatch_size": 8}, 1, {}, ParallelPlanError, "each size of ramp_up .*Use 8"),
        ({"pp": 2, "microbatch_size": None}, 2, {}, ParallelPlanError, "samples that divides 4"),
        ({}, 1, {"accumulate_grad_batches": 2}, UnsupportedError, "optimizer step"),
        ({"microbatch_size": 1}, 8, {}, ParallelPlanError, "4 is not one of 8 x 1 = 8"),
    ):
        with pytest.raises(error, match=message):
            run_job(job(corpus, options, limits=limits), size)
        assert not torch.distributed.is_initialized()
    with pytest.raises(UnsupportedError, match="optimizer step"):
        run_job(job(corpus, None, limits={"accumulate_grad_batches": 2}))
