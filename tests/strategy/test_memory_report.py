"""The memory report counts, estimates and prints the memory of each pipeline stage."""

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

# Every parameter's extent is a multiple of 64, so that buffers hold no padding between parameters.
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
    """A model whose buffers hold almost no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.config = GPTConfig.gpt2(**SIZES)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = GPT(self.config, mesh=self.device_mesh, seed=7)


class ExpertsLM(LargerLM):
    """The larger model with experts in every second layer."""

    def __init__(self) -> None:
        super().__init__()
        experts = ExpertsConfig(
            num_experts=4, top_k=2, ffn_hidden_size=64, layers=2, shared_ffn_hidden_size=64
        )
        self.config = GPTConfig.llama(**SIZES, ffn_hidden_size=128, experts=experts)


def report_layouts(rank: int, size: int) -> list[tuple[StageReport, ...]]:
    reports_of_layouts = []
    layouts: list[dict[str, Any]] = [
        {},
        {"zero": 0},
        {"pp": 2},
        {"gradient_dtype": "bfloat16"},
    ]
    for options in layouts:
        callback = MemoryReport()
        fit(LargerLM(), callback, size, **options)
        reports_of_layouts.append(callback.reports)
    for options in ({"ep": 2}, {"pp": 2}):
        callback = MemoryReport()
        fit(ExpertsLM(), callback, size, **options)
        reports_of_layouts.append(callback.reports)
    return reports_of_layouts


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
    assert [report.stage for report in stages] == [0, 1]
    assert [report.estimate.in_flight for report in stages] == [2, 1]
    for report in stages:
        assert report.bytes_per_parameter == pytest.approx(18, rel=0.01)
        assert report.estimate.num_parameters == pytest.approx(
            report.held["parameters"] / 2, rel=0.01
        )
    assert [len(reports) for reports in with_experts] == [1, 2]
    for report in (report for reports in with_experts for report in reports):
        for part, held in report.held.items():
            assert getattr(report.estimate, part) == pytest.approx(held, rel=0.02), part


def test_table_is_printed_once_and_shows_unknown_values_as_not_available(
    capsys: pytest.CaptureFixture[str],
):
    callback = MemoryReport()
    fit(LargerLM(), callback)
    printed = capsys.readouterr().out
    assert printed.count("stage 0 (MiB per rank)") == 1
    assert callback.reports[0].table() in printed
    rows = {line.split("  ")[0]: line.split() for line in callback.reports[0].table().splitlines()}
    assert rows["peak"][-1] == "n/a"
    assert rows["peak"][1] != "n/a"
    assert rows["bytes per parameter"][-2:] == ["18.00", "18.00"]
    with_peak = replace(callback.reports[0], peak=2 * callback.reports[0].estimate.peak)
    assert with_peak.ratio == 0.5
    assert "0.500" in with_peak.table()
    assert "(GiB per rank)" in replace(with_peak, peak=2**31).table()


class OrdinaryModule(LightningModule):
    """A module of ordinary layers; its optimizer keeps one tensor for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["tokens"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_memory_of_ordinary_modules_is_counted_and_their_peak_is_unknown():
    callback = MemoryReport(after_steps=1)
    fit(OrdinaryModule(), callback, precision="32-true")
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


def test_single_device_strategy_is_refused():
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, callbacks=[MemoryReport()]
    )
    with pytest.raises(UnsupportedError, match="the strategy is SingleDeviceStrategy"):
        trainer.fit(OrdinaryModule(), loader())


def test_reports_of_ranks_of_a_stage_are_merged_into_their_maximum(
    capsys: pytest.CaptureFixture[str],
):
    callback = MemoryReport()
    fit(LargerLM(), callback)
    first_stage = callback.reports[0]
    smaller = replace(
        first_stage, held={name: size // 2 for name, size in first_stage.held.items()}, peak=5
    )
    second_stage = replace(first_stage, stage=1, peak=3)
    merged = merge_ranks(
        [
            second_stage,
            replace(smaller, peak=5),
            replace(first_stage, peak=7),
            replace(second_stage, peak=9),
        ]
    )
    assert [(report.stage, report.peak) for report in merged] == [(0, 7), (1, 9)]
    assert merged[0].held == first_stage.held


def test_state_copies_of_optimizers_and_token_shapes_of_batches_are_recognized():
    weight = [nn.Parameter(torch.ones(3))]
    adam = torch.optim.AdamW(weight, amsgrad=True)
    assert [
        state_copies(optimizer)
        for optimizer in (adam, torch.optim.SGD(weight), torch.optim.Adagrad(weight))
    ] == [3, 0, 1]
    unknown = torch.optim.RMSprop(weight, momentum=0.9)
    weight[0].grad = torch.ones(3)
    unknown.step()
    assert state_copies(unknown) == 2
    tokens = torch.zeros(2, 5, dtype=torch.long)
    assert tokens_shape({"x": torch.zeros(2, 3), "y": [tokens]}) == (2, 5)
    assert tokens_shape(("text", 3)) is None
