"""What a training logs of itself is the same on all ranks, and that of a count by hand in every
layout.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import TrainingMetrics
from tests.fits import (
    BATCH,
    GPT2,
    MIXTURE,
    SEQUENCE,
    Job,
    Module,
    Report,
    Tokens,
    Vectors,
    run_job,
    run_jobs_on,
)

#: Forward pass of a token of GPT2: in each of four layers the products of attention (query, key,
#: value, output), its scores and values over half of the sequence, and the MLP; then the logits of
#: a vocabulary of 300, padded to 384.
FORWARD = 4 * (4 * 2 * 32 * 32 + 2 * (2 * SEQUENCE * 32) / 2 + 2 * 2 * 32 * 128) + 2 * 32 * 384
#: The same of MIXTURE: two groups of keys and values, two experts of 16 features with gates, the
#: router of eight experts.
MIXED = (
    4 * (2 * 32 * 8 * (4 + 2 + 2 + 4) + 2 * (2 * SEQUENCE * 32) / 2)
    + 4 * (2 * 3 * 2 * 32 * 16 + 2 * 32 * 8)
    + 2 * 32 * 384
)
PEAK = 2e-3
#: Seconds that the first rank takes for a sample.
NAP = 0.03


class SlowTokens(Tokens):
    """Data that one rank alone waits for."""

    def __getitem__(self, index: int) -> Any:
        if index % BATCH == 0:
            time.sleep(NAP)
        return super().__getitem__(index)


class Kept(pl.Callback):
    """Keep what was measured at every logged step; it stands before the metrics."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {"values": []}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        metrics = next(one for one in trainer.callbacks if isinstance(one, TrainingMetrics))
        metrics.on_train_batch_end(trainer, module, *args)
        self.outcomes["values"].append(metrics.values)


def callbacks() -> list[pl.Callback]:
    return [Kept(), TrainingMetrics(peak_tflops=PEAK)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Blocks(Module):
    """A network of plain blocks, whose FLOPs torch counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(hidden, batch[1])


def job(layout: dict[str, Any], clips: bool = False, **options: Any) -> Job:
    trainer = {"log_every_n_steps": 1, "gradient_clip_val": 1.0 if clips else None}
    trainer |= options.pop("trainer", {})
    model = options.pop("model", MIXTURE if "ep" in layout else GPT2)
    return Job(model, layout, trainer=trainer, callbacks=callbacks, norms=False, **options)


#: All on four ranks: the others are data-parallel.
JOBS = {
    "dp4": job({}, data=SlowTokens),
    "tp2": job({"tp": 2}),
    "pp2": job({"pp": 2}, clips=True),
    "tp2 pp2": job({"tp": 2, "pp": 2}),
    "tp2 pp2 clipped": job({"tp": 2, "pp": 2}, clips=True),
    "cp2": job({"cp": 2}),
    "ep2": job({"ep": 2}),
    "accumulated": job({"tp": 2}, steps=1, trainer={"accumulate_grad_batches": 2}),
    "every other": job({"pp": 2}, trainer={"log_every_n_steps": 2}),
}


OWN = {
    name: job(layout, model=Blocks, data=Vectors)
    for name, layout in {
        "own dp4": {},
        "own tp2": {"tp": 2, "tensor_parallel_plan": {"*.up": "column", "*.down": "row"}},
        "own pp2": {"pp": 2, "pipeline_plan": {"blocks": "blocks"}},
    }.items()
}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return run_jobs_on(4, JOBS | OWN)


def check(values: dict[str, float], num_steps: int, num_gpus: int, forward: float) -> None:
    """Compare rates with the tokens and FLOPs of a step, counted by hand."""
    tokens = num_steps * BATCH * SEQUENCE
    seconds = values["train/step_seconds"]
    assert 0 < values["train/data_seconds"] < seconds
    assert values["train/tokens_per_second"] * seconds == pytest.approx(tokens)
    per_gpu = values["train/tokens_per_second_per_gpu"]
    assert per_gpu * num_gpus == pytest.approx(values["train/tokens_per_second"])
    tflops = values["train/tflops_per_gpu"]
    assert tflops * 1e12 * num_gpus * seconds == pytest.approx(3 * tokens * forward)
    assert values["train/mfu"] == pytest.approx(tflops / PEAK)
    for absent in ("train/loss_scale", "train/skipped_steps", "train/peak_memory_gib"):
        assert absent not in values


@pytest.mark.parametrize("name", JOBS)
def test_values_are_those_of_a_count_by_hand_and_of_one_process(name, reports):
    mine = [report.outcomes["values"] for report in reports[name]]
    assert mine == [mine[0]] * 4, "the same on all ranks"
    forward = MIXED if name == "ep2" else FORWARD
    batches = 2 if name == "accumulated" else 1
    check(mine[0][-1], batches, 4, forward)
    twin = run_job(
        Job(JOBS[name].model, trainer={**JOBS[name].trainer}, steps=JOBS[name].steps, data=Tokens)
    )
    every = JOBS[name].trainer["log_every_n_steps"]
    logged = [values for values in mine[0][batches - 1 :: batches] if values]
    if every == 2:
        logged = logged[:1]
    steps = range(every - 1, len(twin.norms), every)
    norms = [values["train/gradient_norm"] for values in logged]
    assert norms == pytest.approx([twin.norms[step] for step in steps], rel=1e-10)
    rates = [values["train/learning_rate"] for values in logged]
    assert rates == pytest.approx([1e-2 / (1 + step) for step in steps])
    metrics = reports[name][3].metrics
    assert metrics["train/tflops_per_gpu"] == pytest.approx(logged[-1]["train/tflops_per_gpu"])


@pytest.mark.parametrize("name", OWN)
def test_flops_of_own_modules_are_those_of_the_whole_module(name, reports):
    """Vectors have six rows of eight; the first block's input needs no gradient."""
    ranks = [report.outcomes["values"] for report in reports[name]]
    assert ranks == [ranks[0]] * 4
    values = ranks[0][-1]
    assert "train/tokens_per_second" not in values
    product = 2 * 6 * 8 * 8
    flops = values["train/tflops_per_gpu"] * 1e12 * 4 * values["train/step_seconds"]
    assert flops == pytest.approx(BATCH * (2 * product + 3 * 3 * product))


def test_a_wait_for_data_is_that_of_the_rank_that_waits_longest(reports):
    for values in reports["dp4"][3].outcomes["values"]:
        assert values["train/data_seconds"] >= NAP


def test_one_process_measures_the_same_by_every_strategy():
    ours = run_job(job({})).outcomes["values"]
    lightning = run_job(job({}).twin()).outcomes["values"]
    for ours_or_not in (ours, lightning):
        check(ours_or_not[-1], 1, 1, FORWARD)
        assert ours_or_not[-1]["train/learning_rate"] == pytest.approx(1e-2 / 3)
    assert set(ours[-1]) - set(lightning[-1]) == {"train/gradient_norm"}
