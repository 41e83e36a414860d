"""What a training logs of itself is the same on all ranks, and that of a count by hand in every
layout.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import StragglerWatch, TrainingMetrics
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.schedule import build_schedule
from lightning_megatron.plan.simulate import StageCosts, simulate
from lightning_megatron.strategy.callbacks import stragglers, training_metrics
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
EXPOSED = "train/exposed_communication"
SAMPLED = ("train/bubble", EXPOSED, "train/step_seconds")
#: Seconds that the first rank takes for a sample.
NAP = 0.03
#: Seconds of a pass whose bubble is measured; the backward pass takes twice as long.
PAUSE = 0.1


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


def callbacks_that_tell() -> list[pl.Callback]:
    """The same with a watch of ranks, in a process that ends after the test."""
    kept, metrics = callbacks()
    said = kept.outcomes["said"] = []
    training_metrics.rank_zero_info = stragglers.rank_zero_info = said.append
    return [kept, metrics, StragglerWatch(num_steps=1, interval=1)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Blocks(Module):
    """A network of plain blocks, whose FLOPs torch counts."""

    block: type[Block] = Block
    num_blocks = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.num_blocks))

    def loss(self, batch: Any) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return F.mse_loss(hidden, batch[1])


class Pause(torch.autograd.Function):
    """Sleep in the forward pass, and twice as long in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        time.sleep(PAUSE)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * PAUSE)
        return gradient


class SlowBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return Pause.apply(super().forward(hidden))


class SlowBlocks(Blocks):
    """Four blocks whose passes take known times."""

    block, num_blocks = SlowBlock, 4


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
#: Pipelines of passes with known times: 1f1b in four stages, and with chunks in two.
SLOW = {
    f"slow {schedule}": job(
        {**layout, "pipeline_plan": {"blocks": "blocks"}, "schedule": schedule},
        model=SlowBlocks,
        data=Vectors,
        steps=4,
    )
    for schedule, layout in {"1f1b": {"pp": 4}, "interleaved": {"pp": 2, "vpp": 2}}.items()
}
#: Graphs of whole steps, which contain all collectives, and of layers.
GRAPHS = {
    f"{mode} graphs": replace(
        job({"pp": 2, "tp": 2, "cuda_graphs": CudaGraphs(mode, warmup_steps=1)}, steps=4),
        callbacks=callbacks_that_tell,
    )
    for mode in ("full", "segments")
}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return run_jobs_on(4, JOBS | OWN | SLOW | GRAPHS)


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


@pytest.mark.parametrize("name", SLOW)
def test_the_bubble_is_that_of_the_simulator_for_passes_with_known_times(name, reports):
    layout = SLOW[name].strategy
    stages, chunks = layout["pp"], layout.get("vpp", 1)
    microbatches = BATCH // (4 // stages) // 2
    schedule = build_schedule(layout["schedule"], stages, microbatches, chunks)
    virtual = stages * chunks
    bubble = simulate(schedule, StageCosts(*((1,) * virtual,) * 3)).bubble
    ranks = [report.outcomes["values"] for report in reports[name]]
    assert ranks == [ranks[0]] * 4
    busy = 3 * PAUSE * microbatches * chunks
    idle = busy * bubble / (1 - bubble)
    # Other programs disturb steps: on a quiet machine, the best is within one point.
    measured = [tuple(values[name] for name in SAMPLED) for values in ranks[0]]
    assert any(
        # What is neither a pause nor a wait is work of the host.
        abs(share - bubble) < 0.05 and idle / seconds - 0.05 < exposed < 1.05 - busy / seconds
        for share, exposed, seconds in measured
    ), (bubble, measured)


@pytest.mark.parametrize("mode", ["full", "segments"])
def test_what_graphs_hide_is_left_out_and_said_once(mode, reports):
    first, *_, last = reports[f"{mode} graphs"][0].outcomes["values"]
    hidden = {"full": {"train/bubble", EXPOSED}, "segments": {EXPOSED}}[mode]
    assert set(first) - set(last) == hidden
    said = reports[f"{mode} graphs"][0].outcomes["said"]
    told = [text for text in said if "cannot be logged" in text]
    assert len(told) == 1
    assert told[0].startswith(" and ".join(sorted(hidden)) + " cannot be logged: CUDA graphs run ")
    assert sum("StragglerWatch does not see the waits in" in text for text in said) == 1


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
