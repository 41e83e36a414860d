"""The memory report counts, estimates and prints the memory of each pipeline stage, also that of
CUDA graphs for pools and copied inputs.
"""

from __future__ import annotations

import gc
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import CudaGraphs, GPTConfig, MegatronStrategy
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.recording import RecordingInputs
from lightning_megatron.memory.graph_pools import MeasuringBackend, PoolMemory
from lightning_megatron.memory.live_memory import LiveMemory
from lightning_megatron.strategy import megatron_strategy as strategy_module
from lightning_megatron.strategy import memory_estimate
from lightning_megatron.strategy.callbacks import memory_report
from lightning_megatron.strategy.callbacks.memory_report import (
    MemoryReport,
    StageReport,
    merge_ranks,
)
from lightning_megatron.strategy.memory_estimate import state_copies
from tests.fits import Job, Language, Regress, Vectors, run_job, trainer_of
from tests.graphs.jobs import strategy_of
from tests.memory.measured import PatientMemory
from tests.memory.own_modules import LENGTH, SAMPLES, TOKENS, Nano
from tests.tape import EMPTY
from tests.world import run_world

# Every parameter's extent is a multiple of 64, so that buffers hold no padding between parameters.
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "max_seq_length": 64, "num_layers": 4, "hidden_size": 64, "num_heads": 4,
}  # fmt: skip
GPT2 = GPTConfig.gpt2(**SIZES)
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64}
SHARED = {**EXPERTS, "layers": 2, "shared_ffn_hidden_size": 64}
MIXTURE = GPTConfig.llama(**SIZES, ffn_hidden_size=128, experts=SHARED)


def reports_of(
    model: Any, size: int = 1, layout: Any = None, **options: Any
) -> tuple[StageReport, ...]:
    memory = MemoryReport()
    options = {"precision": "bf16-mixed", **options}
    run_job(Job(model, layout or {}, callbacks=lambda: [memory], norms=False, **options), size)
    return memory.reports


def rows_of(report: StageReport) -> dict[str, list[str]]:
    """Return the words of each line of a report, by what it begins with."""
    return {line.split("  ")[0]: line.split() for line in report.table().splitlines()}


def report_layouts(rank: int, size: int) -> list[tuple[StageReport, ...]]:
    layouts: Any = {}, {"optimizer.zero": 0}, {"pp": 2}, {"optimizer.gradient_dtype": "bfloat16"}
    dense = [reports_of(GPT2, size, layout) for layout in layouts]
    return dense + [reports_of(MIXTURE, size, layout) for layout in ({"ep": 2}, {"pp": 2})]


def test_estimate_matches_the_held_memory_of_two_ranks():
    first, second = run_world(report_layouts, 2)
    assert first == second
    sharded, replicated, stages, bfloat16_gradients, *with_experts = first
    for reports, expected in (
        (sharded, 2 + 4 + 12 / 2),
        (replicated, 18),
        (bfloat16_gradients, 2 + 2 + 6),
    ):
        (report,) = reports
        # Buckets are padded by at most 256 elements, and the optimizer keeps a scalar for each
        # parameter that it trains.
        slack = 256 * 18 * 2 + 4 * 100
        assert expected <= report.bytes_per_parameter + 1e-9
        assert sum(report.held.values()) <= expected * report.estimate.num_parameters + slack
        assert report.estimate.static == pytest.approx(sum(report.held.values()), rel=0.01)
        assert report.peak is report.ratio is None
    assert [(report.stage, report.estimate.in_flight) for report in stages] == [(0, 2), (1, 1)]
    for report in stages:
        assert report.bytes_per_parameter == pytest.approx(18, rel=0.01)
        count = report.estimate.num_parameters
        assert count == pytest.approx(report.held["parameters"] / 2, rel=0.01)
    assert [len(reports) for reports in with_experts] == [1, 2]
    for report in (report for reports in with_experts for report in reports):
        for part, held in report.held.items():
            assert getattr(report.estimate, part) == pytest.approx(held, rel=0.02), part


def test_table_is_printed_once_and_ranks_of_a_stage_are_merged_into_their_maximum(capsys):
    (report,) = reports_of(GPT2)
    printed = capsys.readouterr().out
    assert printed.count("stage 0 (MiB per rank)") == 1
    assert report.table() in printed
    rows = rows_of(report)
    assert rows["peak"][1] != "n/a" == rows["peak"][-1]
    assert rows["bytes per parameter"][-2:] == ["18.00", "18.00"]
    with_peak = replace(report, peak=2 * report.estimate.peak)
    assert with_peak.ratio == 0.5
    assert "0.500" in with_peak.table()
    assert "(GiB per rank)" in replace(with_peak, peak=2**31).table()
    halves = {name: size // 2 for name, size in report.held.items()}
    smaller, last = replace(report, held=halves, peak=5), replace(report, stage=1, peak=3)
    ranks = [last, smaller, replace(report, peak=7), replace(last, peak=9)]
    merged = merge_ranks([(one,) for one in ranks])
    assert [(stage.stage, stage.peak) for stage in merged] == [(0, 7), (1, 9)]
    assert merged[0].held == report.held


class Momentum(Regress):
    """A module whose optimizer keeps one tensor for each parameter."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_memory_of_ordinary_modules_is_counted():
    make: Any = partial(Momentum, partial(nn.Linear, 64, 64))
    options: dict[str, Any] = {"data": partial(Vectors, (64,)), "precision": "64-true"}
    (report,) = reports_of(make, **options)
    count = 64 * 64 + 64
    assert report.estimate.num_parameters == count
    parts = {"parameters": 8, "gradients": 8, "main_parameters": 0, "optimizer": 8}
    held = {name: size * count for name, size in parts.items()}
    assert report.held == pytest.approx(held, rel=0.03)
    assert {name: getattr(report.estimate, name) for name in parts} == pytest.approx(held, rel=0.03)
    assert report.estimate.activations > 0
    assert report.ratio is None, "a CPU measures no peak"
    with pytest.raises(UnsupportedError, match="the strategy is SingleDeviceStrategy"):
        run_job(Job(make, callbacks=lambda: [MemoryReport()], **options))


class FrozenBlocks(Language):
    """A language model of which only the head and the embedding are trained."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.layers.requires_grad_(False)


def frozen_fit(rank: int, size: int) -> list[Any]:
    model = partial(FrozenBlocks, replace(GPT2, num_layers=12))
    with shown_estimates() as shown:
        return [reports_of(model, size, {"pp": size}), shown]


@contextmanager
def shown_estimates() -> Iterator[list[Any]]:
    """Collect what fits show of their memory with a first batch: estimates and a text."""
    shown: list[Any] = []
    show = patch.object(strategy_module, "show_memory", lambda *given: shown.append(given[2:]))
    with show, patch.object(memory_estimate._SHOWN_BY, "isEnabledFor", return_value=True):
        yield shown


def test_frozen_parameters_have_no_gradients_and_states_in_the_estimates():
    (first, shown), (second, others) = run_world(frozen_fit, 2)
    assert first == second
    assert others == shown, "ranks of the pipeline of rank 0 estimate their stages"
    ((estimates, text),) = shown
    assert text == "4 microbatches of 2 samples"
    for report, estimate in zip(first, estimates, strict=True):
        held = sum(report.held.values())
        assert report.estimate == estimate
        assert estimate.static == pytest.approx(held, rel=0.01)
        assert held < 12 * estimate.num_parameters
        assert estimate.activations > 0


# ---- modules with code of their own


class Own(Nano):
    """A decoder of plain blocks that does not count its calls, but draws a number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(random.random())  # noqa: S311
        loss = super().training_step(batch, batch_idx)
        self.num_calls = 0
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sized(Own):
    """A decoder that reads a size from the values of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        length = int(batch[0].max() * 0) + LENGTH
        return super().training_step((batch[0][:, :length], batch[1]), batch_idx)


class Rows(Dataset):
    """Rows of tokens, with themselves as labels."""

    def __len__(self) -> int:
        return 8 * SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return TOKENS[index % SAMPLES], TOKENS[index % SAMPLES]


class MeasuredSteps(MegatronStrategy):
    """Strategy that measures what the forward and backward passes of a step hold besides buffers.

    It is the least of all steps: a thread of the communication library may free tensors late.
    """

    peak = sys.maxsize

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        memory = LiveMemory() if self.mesh.world.size == 1 else PatientMemory()
        for buffer in self.run.state.main.buffers:
            memory.leave_out([buffer.parameters, buffer.gradients])
        memory.leave_out([*self.user_module.buffers(), *args[0]])
        with memory:
            output = super().training_step(*args, **kwargs)
        self.peak = min(self.peak, memory.peak)
        return output


def own_fit(rank: int, size: int, make: Any = Own, **layout: Any) -> tuple[Any, ...]:
    """Train a module; return its reports, what the last step held, its draws, and what was shown."""
    report, module = MemoryReport(), make()
    strategy = MeasuredSteps(microbatch_size=SAMPLES, job={"check_microbatches": False}, **layout)
    trainer = Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=5, callbacks=[report], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    random.seed(1)
    with shown_estimates() as shown:
        trainer.fit(module, DataLoader(Rows(), batch_size=2 * SAMPLES))
    return report.reports, strategy.peak, module.drawn, shown


def own_fits(rank: int, size: int) -> list[tuple[Any, ...]]:
    return [own_fit(rank, size, tp=2), own_fit(rank, size, pp=2)]


def check_step(report: StageReport, peak: int) -> None:
    """Check that an estimate is what the passes of a step have held."""
    estimate = report.estimate
    step = estimate.activations + estimate.workspace + estimate.communication
    assert step == pytest.approx(peak, rel=0.03)
    assert estimate.static == pytest.approx(sum(report.held.values()), rel=0.01)
    assert report.reason == ""


def test_a_step_of_a_users_module_is_estimated_as_it_is_held():
    (report,), peak, drawn, (((estimate,), text),) = own_fit(0, 1)
    check_step(report, peak)
    assert estimate == report.estimate
    assert text == "2 microbatches of 4 samples"
    random.seed(1)
    assert drawn == [random.random() for _ in drawn]  # noqa: S311
    assert "the peak is in backward" in report.table()


def test_a_step_of_a_users_module_over_two_ranks_is_estimated_as_it_is_held():
    for rank, (cut, staged) in enumerate(run_world(own_fits, 2)):
        check_step(cut[0][0], cut[1])
        check_step(staged[0][rank], staged[1])
        assert [len(cut[3]), len(staged[3])] == [rank == 0, True], "the pipeline of rank 0 traces"


def test_a_module_that_cannot_be_traced_says_where_and_keeps_its_static_parts():
    (report,), _, _, ((estimates, reason),) = own_fit(0, 1, Sized)
    assert estimates == ()
    assert re.search(r"test_memory_report.py:\d+ \('length = int", reason)
    assert report.reason == reason
    assert report.table().endswith(reason)
    assert report.estimate.activations == 0
    assert report.estimate.static == pytest.approx(sum(report.held.values()), rel=0.01)


def test_a_fit_traces_nothing_while_its_table_is_hidden():
    real = memory_estimate.estimate_stage
    with patch.object(memory_estimate, "estimate_stage", wraps=real) as trace:
        run_job(Job(GPT2, {}, norms=False))
        assert not trace.called
        with patch.object(memory_estimate._SHOWN_BY, "isEnabledFor", return_value=True):
            run_job(Job(GPT2, {}, norms=False))
        assert trace.called


def test_state_copies_of_optimizers_are_recognized():
    weight = [nn.Parameter(torch.ones(3))]
    adam = torch.optim.AdamW(weight, amsgrad=True)
    optimizers = [adam, torch.optim.SGD(weight), torch.optim.Adagrad(weight)]
    assert [state_copies(optimizer) for optimizer in optimizers] == [3, 0, 1]
    unknown = torch.optim.RMSprop(weight, momentum=0.9)
    weight[0].grad = torch.ones(3)
    unknown.step()
    assert state_copies(unknown) == 2


# ---- CUDA graphs

SMALL: dict[str, Any] = {**SIZES, "vocab_size": 128, "vocab_multiple": 128}
# On the CPU torch computes RMSNorm from smaller operations, which keep more.
LLAMA = GPTConfig.llama(**SMALL, num_kv_heads=2, ffn_hidden_size=192, norm="layernorm")
CAPTURED = {
    "gpt2": GPTConfig.gpt2(**SMALL),
    "llama": LLAMA,
    "experts": replace(LLAMA, experts=EXPERTS),
}


class ZeroingMemory(PoolMemory):
    """Memory of a pool whose empty tensors are zero: a call between two graphs would write them."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.overloadpacket in EMPTY:
            result.zero_()
        return result


class MeasuringReport(MemoryReport):
    """Memory report that also measures the pools and copied inputs of the graphs (bytes)."""

    def __init__(self) -> None:
        super().__init__(after_steps=1)
        self.backend = MeasuringBackend(ZeroingMemory)
        self.num_bytes, self.num_pools, self.num_before = 0, 0, 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        graphs = strategy_of(trainer).run.graphs
        self.num_before = 0 if graphs is None else graphs.num_graphs

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        inputs = [item for item in gc.get_objects() if type(item) is RecordingInputs]
        copies = [tensor.nbytes for item in inputs for tensor in item.copied]
        pools = [pool.memory.peak for pool in self.backend.pools if pool.memory.peak > 0]
        self.num_bytes, self.num_pools = sum(copies) + sum(pools), len(pools)


def measured(
    graphs: CudaGraphs, kind: str, size: int = 1, validates: bool = False, **layout: Any
) -> MeasuringReport:
    """Train for two steps, and validate first on request; the second step captures graphs."""
    report = MeasuringReport()
    layout = {"microbatch_size": 8, "cuda_graphs": graphs, **layout}
    options = {"gradient_clip_val": None}
    trainer = trainer_of(Job(Language, layout, "bf16-true", 2, options), size, report)
    strategy_of(trainer)._make_backend = lambda mesh: report.backend
    tokens = torch.randint(0, 128, (16, 65))
    batches = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=8)
    trainer.fit(Language(CAPTURED[kind]), batches, batches if validates else None)
    return report


def test_estimate_matches_measured_graph_memory_of_one_process():
    options: dict[str, Any]
    for kind, mode, options, layout in (
        ("gpt2", "segments", {}, {"recompute": "none"}),
        ("gpt2", "segments", {}, {"recompute": "selective"}),
        ("llama", "full", {}, {"recompute": "full"}),
        ("experts", "segments", {}, {"recompute": "full"}),
        ("experts", "segments", {}, {"recompute": "expert_inputs"}),
        ("gpt2", "segments", {"scopes": ("attention", "mlp")}, {}),
        ("gpt2", "segments", {"scopes": ("embedding", "head")}, {}),
        ("experts", "segments", {"scopes": ("combine", "attention")}, {}),
        ("experts", "segments", {"scopes": ("router", "preprocess", "experts", "combine")}, {}),
    ):
        actual = measured(CudaGraphs(mode, warmup_steps=1, **options), kind, **layout)
        (report,) = actual.reports
        assert options or actual.num_pools == 1
        tolerance = 0.1 if options else 0.08
        assert report.estimate.graphs == pytest.approx(actual.num_bytes, rel=tolerance), options
        printed = float(rows_of(report)["CUDA graphs"][2])
        assert printed == pytest.approx(report.estimate.graphs / 2**20, 0.01)


def test_captured_validation_is_estimated_and_the_peak_is_that_of_the_eager_training_step(
    monkeypatch,
):
    peaks = iter(range(1, 9))
    monkeypatch.setattr(memory_report, "peak_of", lambda device: next(peaks))
    actual = measured(
        CudaGraphs("full", warmup_steps=1, evaluation=True), "experts", validates=True
    )
    (report,) = actual.reports
    assert report.estimate.graphs == pytest.approx(actual.num_bytes, rel=0.08)
    # The sanity check is captured, the first training step is eager, the second is captured.
    assert (actual.num_before, report.peak) == (1, 1)


def measure_stages(rank: int, size: int) -> list[tuple[str, Any, int, int]]:
    results = []
    for kind, schedule, mode, recompute in (
        ("gpt2", "zb-h1", "segments", "none"),
        ("gpt2", "1f1b", "full", "none"),
        ("experts", "1f1b", "segments", "full"),
    ):
        graphs = CudaGraphs(mode, warmup_steps=1)
        layout = {"pp": 2, "schedule": schedule, "recompute": recompute, "microbatch_size": 2}
        actual = measured(graphs, kind, size, **layout)
        estimate = actual.reports[rank].estimate.graphs
        results.append((f"{kind} {schedule}", estimate, actual.num_bytes, actual.num_pools))
    return results


def test_estimate_matches_graph_memory_of_stages_with_microbatches_in_flight():
    first, last = run_world(measure_stages, 2)
    for name, estimate, num_bytes, _ in (*first, *last):
        assert estimate == pytest.approx(num_bytes, rel=0.1), name
    # Segments have one pool for each slot, a full-step graph has one pool. All microbatches share
    # the pool of recomputed layers; the embedding and the head have pools for their slots.
    assert [num_pools for *_, num_pools in first] == [2, 1, 2 + 1]
    assert [num_pools for *_, num_pools in last] == [2, 1, 1 + 1]
