"""Microbatches that share casts of weights cast less often and compute the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_megatron import FP8, CudaGraphs, MegatronStrategy, MemoryReport
from lightning_megatron.models.layered import layered_modules
from lightning_megatron.strategy.logs.run_table import _cast_choices
from tests.layers.test_weight_casts import counting_casts
from tests.strategy.graph_fits import Fit, fit
from tests.strategy.tiny import TinyLM

FULL = CudaGraphs("full", warmup_steps=1)
SEGMENTS = CudaGraphs("segments", warmup_steps=1)
#: Linear layers of a block: fused queries, keys and values; output; up; down.
LINEARS = 4
#: A batch of four samples is cut into four microbatches.
SPLIT = {"microbatch_size": 1}


class CountCasts(Callback):
    """Count the casts of each step, and the bytes that are kept after it."""

    def __init__(self, casts: list[str]) -> None:
        self.casts = casts
        self.counts: list[int] = []
        self.kept_bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.casts.clear()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.counts.append(len(self.casts))
        for model in layered_modules(module):
            self.kept_bytes += 0 if model.weight_casts is None else model.weight_casts.num_bytes


def train_and_count(
    fp8: FP8, size: int = 1, layout: dict[str, Any] | None = None, **options: Any
) -> tuple[Fit, list[int]]:
    """Train; return the results, and the number of casts of this rank in each step."""
    layout = {**SPLIT, "fp8": fp8, **(layout or {})}
    graphs = options.pop("graphs", None)
    further = options.pop("callbacks", ())
    with counting_casts() as casts:
        counting = CountCasts(casts)
        options = {"max_steps": 3, "limit_val_batches": 0, **options}
        result = fit(graphs, size, layout, callbacks=(counting, *further), **options)
    assert counting.kept_bytes == 0
    return result, counting.counts


def is_same(actual: Fit, expected: Fit) -> bool:
    """Return whether losses and weights have the same bits; numbers of collectives may differ."""
    return actual.losses == expected.losses and all(
        torch.equal(weight, expected.weights[name]) for name, weight in actual.weights.items()
    )


def test_each_weight_is_cast_once_per_batch() -> None:
    recipe, recompute, accumulated = "rowwise", "full", 2
    settings = FP8(recipe, emulate=True)  # type: ignore[arg-type]
    layout = {"recompute": recompute}
    options = {"accumulate_grad_batches": accumulated}
    shared, counts = train_and_count(settings, layout=layout, **options)
    separate, separate_counts = train_and_count(
        replace(settings, cast_weights="microbatch"), layout=layout, **options
    )
    # Two layers; rows and columns.
    assert counts == [2 * LINEARS * 2] * len(counts)
    casts_per_weight = 3 if recompute else 2
    assert separate_counts == [2 * LINEARS * casts_per_weight * 4] * len(separate_counts)
    assert is_same(shared, separate)
    assert shared.losses[-1] < shared.losses[0]


def test_batch_of_one_microbatch_shares_casts_only_on_request() -> None:
    layout = {"microbatch_size": "batch", "recompute": "full"}
    shared, counts = train_and_count(FP8(emulate=True, cast_weights="batch"), layout=layout)
    separate, separate_counts = train_and_count(FP8(emulate=True), layout=layout)
    assert set(counts) == {2 * LINEARS * 2}
    assert set(separate_counts) == {2 * LINEARS * 3}
    assert is_same(shared, separate)


def test_graphs_of_full_steps_contain_the_casts() -> None:
    settings = FP8("delayed", emulate=True)
    # The first step has no scales of earlier steps, so that "delayed" captures a second time.
    eager, _ = train_and_count(settings, max_steps=6)
    graphs, counts = train_and_count(settings, graphs=FULL, max_steps=6)
    assert graphs.num_graphs[-1] > 0
    # Replays run no Python: the casts of the capture are in the graph.
    assert counts[0] == 2 * LINEARS * 2
    assert counts[-1] == 0
    assert is_same(graphs, eager)


def test_graphs_of_segments_cast_in_each_microbatch() -> None:
    settings = FP8(emulate=True)
    eager, _ = train_and_count(settings)
    graphs, counts = train_and_count(settings, graphs=SEGMENTS)
    assert graphs.num_graphs[-1] > 0
    assert counts[0] == 2 * LINEARS * 2 * 4
    assert is_same(graphs, eager)


class Writes(TinyLM):
    """A model whose step writes weights between microbatches with the given function."""

    write: Callable[[Tensor], None]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for model in layered_modules(self):
            for name, weight in model.named_parameters():
                if name.endswith("mlp.down.weight"):
                    self.write(weight)
        return super().training_step(batch, batch_idx)


def _by_data(weight: Tensor) -> None:
    weight.data.mul_(0.9)


@pytest.mark.parametrize("write", [_by_data])
def test_weights_that_a_step_writes_are_cast_again(write: Callable[[Tensor], None]) -> None:
    runs = []
    for cast_weights in (None, "microbatch"):
        module = Writes()
        module.write = write  # type: ignore[method-assign]
        settings = FP8(emulate=True, cast_weights=cast_weights)  # type: ignore[arg-type]
        runs.append(train_and_count(settings, module=module))
    (shared, counts), (separate, separate_counts) = runs
    assert is_same(shared, separate)
    assert counts[0] < separate_counts[0]


class Swaps(Callback):
    """Write weights between batches as weight averages do, unnoticed by torch's counters."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronStrategy)
        for buffer in strategy.run.state.main.buffers:
            buffer.parameters.mul_(0.99)


def test_weights_that_a_callback_writes_between_batches_are_cast_again() -> None:
    shared, _ = train_and_count(FP8(emulate=True), callbacks=(Swaps(),))
    separate, _ = train_and_count(
        FP8(emulate=True, cast_weights="microbatch"), callbacks=(Swaps(),)
    )
    assert is_same(shared, separate)
    without_swaps, _ = train_and_count(FP8(emulate=True))
    assert not is_same(shared, without_swaps)


def test_table_shows_how_often_weights_are_cast() -> None:
    module = TinyLM()

    def row(cast_weights: Any = None, **options: Any) -> tuple[str, str]:
        fp8 = FP8(emulate="backend" not in options, cast_weights=cast_weights)
        strategy = MegatronStrategy(fp8=fp8, **options)
        (choice,) = _cast_choices(module, strategy.options)
        return choice.value, choice.reason

    kept_reason = "kept until its end, 2 bytes for each FP8 weight"
    assert row() == ("once per batch of several microbatches", kept_reason)
    assert row("batch") == ("once per batch", kept_reason)
    assert row("microbatch") == ("for each product", "asked for (cast_weights)")
    assert row(cuda_graphs=SEGMENTS) == (
        "for each product",
        "cuda_graphs captures microbatches one by one",
    )
    module.automatic_optimization = False
    assert row()[0] == "for each product"
    assert _cast_choices(module, MegatronStrategy().options) == []
    assert _cast_choices(module, MegatronStrategy(fp8="tensorwise", backend="te").options) == []


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_memory_report_counts_shared_casts(microbatch_size: int) -> None:
    report = MemoryReport(after_steps=1)
    layout = {"microbatch_size": microbatch_size, "sequence_parallel": False}
    train_and_count(FP8(emulate=True), layout=layout, callbacks=(report,))
    (stage_report,) = report.reports
    # Two blocks with 16 features: queries, keys and values have 3 x 16 x 16 weights, the output
    # 1 x 16 x 16, up and down 4 x 16 x 16 each. Both operands have a byte for each weight, and a
    # scale of four bytes for each layer.
    weights = 2 * (2 * 16 * 16 * (3 + 1 + 4 + 4) + LINEARS * 2 * 4)
    assert stage_report.estimate.casts == (weights if microbatch_size == 1 else 0)
    assert re.search(r"^casts +\d", stage_report.table(), re.MULTILINE)
