"""What the memory report counts, estimates and prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatron import GPTConfig, MegatronStrategy, UnsupportedError
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.strategy.callbacks.memory_report import (
    MemoryReport,
    StageReport,
    merge_ranks,
    state_copies,
    tokens_shape,
)
from tests.strategy.tiny import TinyLM, loader
from tests.world import run_world

# Sizes of which every parameter's extent is a multiple of 64, so that buffers hold no padding
# between parameters.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "max_seq_length": 64,
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
}


def fit(module: LightningModule, callback: MemoryReport, devices: int = 1, **options: Any) -> None:
    precision = options.pop("precision", "bf16-mixed")
    Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MegatronStrategy(microbatch_size=2, **options),
        precision=precision,
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    ).fit(module, loader())


class LargerLM(TinyLM):
    """A model whose buffers hold next to no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPTConfig.gpt2(**SIZES)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = GPT(self.config, mesh=self.device_mesh, seed=7)


class ExpertsLM(LargerLM):
    """The same with experts in every second layer."""

    def __init__(self) -> None:
        super().__init__()
        experts = ExpertsConfig(
            num_experts=4, top_k=2, ffn_hidden_size=64, layers=2, shared_ffn_hidden_size=64
        )
        self.config = GPTConfig.llama(**SIZES, ffn_hidden_size=128, experts=experts)


def report_of_ranks(rank: int, size: int) -> list[tuple[StageReport, ...]]:
    found = []
    layouts: list[dict[str, Any]] = [
        {},
        {"zero": 0},
        {"pp": 2},
        {"precision": "32-true"},
        {"gradient_dtype": "bfloat16"},
    ]
    for options in layouts:
        callback = MemoryReport()
        fit(LargerLM(), callback, size, **options)
        found.append(callback.reports)
    for options in ({"ep": 2}, {"pp": 2}, {"tp": 2, "etp": 1}):
        callback = MemoryReport()
        fit(ExpertsLM(), callback, size, **options)
        found.append(callback.reports)
    return found


def test_two_data_ranks_hold_what_the_estimate_says():
    first, second = run_world(report_of_ranks, 2)
    assert first == second
    sharded, whole, stages, single, narrow, *with_experts = first
    for reports, expected in (
        (sharded, 2 + 4 + 12 / 2),
        (whole, 18),
        (single, 4 + 4 + 8 / 2),
        (narrow, 2 + 2 + 6),
    ):
        (report,) = reports
        # A few buckets, each padded to 256 elements at most; a scalar for each parameter that the
        # optimizer trains.
        slack = 256 * 18 * 2 + 4 * 100
        assert expected <= report.bytes_per_parameter + 1e-9
        assert sum(report.held.values()) <= expected * report.estimate.num_parameters + slack
        assert report.estimate.static == pytest.approx(sum(report.held.values()), rel=0.01)
        assert report.peak is report.ratio is None
    assert [report.stage for report in stages] == [0, 1]
    assert [report.estimate.in_flight for report in stages] == [2, 1]
    for report in stages:
        assert report.bytes_per_parameter == pytest.approx(18, rel=0.01)
        assert report.estimate.num_parameters == pytest.approx(
            report.held["parameters"] / 2, rel=0.01
        )
    assert [len(reports) for reports in with_experts] == [1, 2, 1]
    for report in (report for reports in with_experts for report in reports):
        for part, held in report.held.items():
            assert getattr(report.estimate, part) == pytest.approx(held, rel=0.02), part


def test_the_table_is_printed_once_with_what_is_not_known_named(capsys: pytest.CaptureFixture[str]):
    callback = MemoryReport()
    fit(LargerLM(), callback)
    printed = capsys.readouterr().out
    assert printed.count("stage 0 (MiB per rank)") == 1
    assert callback.reports[0].table() in printed
    lines = {line.split("  ")[0]: line.split() for line in callback.reports[0].table().splitlines()}
    assert lines["peak"][-1] == "n/a"
    assert lines["peak"][1] != "n/a"
    assert lines["bytes per parameter"][-2:] == ["18.00", "18.00"]
    with_peak = replace(callback.reports[0], peak=2 * callback.reports[0].estimate.peak)
    assert with_peak.ratio == 0.5
    assert "0.500" in with_peak.table()
    assert "(GiB per rank)" in replace(with_peak, peak=2**31).table()


class Line(LightningModule):
    """Ordinary layers, and an optimizer that keeps one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["tokens"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_other_modules_have_their_parts_counted_and_their_peak_unknown():
    callback = MemoryReport(after_steps=1)
    fit(Line(), callback, precision="32-true")
    (report,) = callback.reports
    count = 32 * 64 + 64 * 64 + 64
    assert report.estimate.num_parameters == count
    assert report.held == pytest.approx(
        {
            "parameters": 4 * count,
            "gradients": 4 * count,
            "main_parameters": 0,
            "optimizer": 4 * count,
        },
        rel=0.03,
    )
    assert report.ratio is None
    assert "n/a" in report.table()


def test_another_strategy_is_refused():
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, callbacks=[MemoryReport()]
    )
    with pytest.raises(UnsupportedError, match="the strategy is SingleDeviceStrategy"):
        trainer.fit(Line(), loader())


def test_ranks_of_a_stage_are_joined_by_the_most_they_hold(capsys: pytest.CaptureFixture[str]):
    callback = MemoryReport()
    fit(LargerLM(), callback)
    one = callback.reports[0]
    smaller = replace(one, held={name: size // 2 for name, size in one.held.items()}, peak=5)
    other = replace(one, stage=1, peak=3)
    joined = merge_ranks(
        [other, replace(smaller, peak=5), replace(one, peak=7), replace(other, peak=9)]
    )
    assert [(report.stage, report.peak) for report in joined] == [(0, 7), (1, 9)]
    assert joined[0].held == one.held


def test_optimizers_and_batches_are_known_by_what_they_are():
    weight = [nn.Parameter(torch.ones(3))]
    adam = torch.optim.AdamW(weight, amsgrad=True)
    assert [
        state_copies(o) for o in (adam, torch.optim.SGD(weight), torch.optim.Adagrad(weight))
    ] == [3, 0, 1]
    unknown = torch.optim.RMSprop(weight, momentum=0.9)
    weight[0].grad = torch.ones(3)
    unknown.step()
    assert state_copies(unknown) == 2
    tokens = torch.zeros(2, 5, dtype=torch.long)
    assert tokens_shape({"x": torch.zeros(2, 3), "y": [tokens]}) == (2, 5)
    assert tokens_shape(("text", 3)) is None
