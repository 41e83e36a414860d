"""The memory report counts what the pools of CUDA graphs really need."""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from lightning_megatron import CudaGraphs, GPTConfig, MegatronStrategy
from lightning_megatron.graphs.piece_inputs import PieceInputs
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.strategy.callbacks import memory_report
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport
from tests.graphs.measured_pools import MeasuringBackend
from tests.strategy.graph_fits import num_graphs_of
from tests.strategy.tiny import TinyLM
from tests.world import run_world

LENGTH = 64
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "max_seq_length": LENGTH,
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "vocab_multiple": 128,
}
LLAMA: dict[str, Any] = {
    **SIZES,
    "num_kv_heads": 2,
    "ffn_hidden_size": 192,
    # On the CPU torch computes RMSNorm from smaller operations, which keep more.
    "norm": "layernorm",
}
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, ffn_hidden_size=64)
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SIZES),
    "llama": GPTConfig.llama(**LLAMA),
    "experts": GPTConfig.llama(**LLAMA, experts=EXPERTS),
}


class SizedLM(TinyLM):
    """Train a model of some configuration."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config


@dataclass
class Measured(MemoryReport):
    """What a fit reports, and what its pools and inputs really need.

    Args:
        backend: Backend of the graphs.
        input_bytes: Copied inputs of the pieces (bytes).
        num_before: Number of graphs before the first training step.
    """

    backend: MeasuringBackend
    input_bytes: int = 0
    num_before: int = 0

    def __post_init__(self) -> None:
        MemoryReport.__init__(self, after_steps=1)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.num_before = num_graphs_of(trainer)

    def on_train_batch_end(self, *given: Any, **named: Any) -> None:
        super().on_train_batch_end(*given, **named)
        inputs = [one for one in gc.get_objects() if type(one) is PieceInputs]
        self.input_bytes = sum(one.num_bytes for one in inputs)

    @property
    def num_bytes(self) -> int:
        """Return the size of the pools and inputs (bytes)."""
        return self.backend.num_bytes + self.input_bytes

    @property
    def num_pools(self) -> int:
        """Return the number of pools that are used."""
        return sum(pool.memory.peak > 0 for pool in self.backend.pools)


def fit(
    graphs: CudaGraphs,
    config: GPTConfig,
    microbatch_size: int,
    devices: int = 1,
    validates: bool = False,
    **options: Any,
) -> Measured:
    """Train for two steps, the second of which captures; first validate on request."""
    backend = MeasuringBackend()
    strategy = MegatronStrategy(
        microbatch_size=microbatch_size, check_microbatches=False, cuda_graphs=graphs, **options
    )
    strategy._make_backend = lambda mesh: backend
    report = Measured(backend)
    tokens = torch.randint(0, 128, (16, LENGTH + 1))
    batches = DataLoader([{"tokens": one[:-1], "labels": one[1:]} for one in tokens], batch_size=8)
    Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="bf16-true",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[report],
    ).fit(SizedLM(config), batches, batches if validates else None)
    return report


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("mode", ["segments", "full"])
def test_one_process(kind: str, mode: Any) -> None:
    graphs = CudaGraphs(mode, warmup_steps=1)
    of_experts = ("experts", "expert_inputs") if kind == "experts" else ()
    for recompute in ("none", "selective", "full", *of_experts):
        measured = fit(graphs, CONFIGS[kind], 8, recompute=recompute)
        assert measured.num_pools == 1
        (report,) = measured.reports
        assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.08), recompute
        rows = {line.split("  ")[0]: line.split() for line in report.table().splitlines()}
        assert float(rows["CUDA graphs"][2]) == pytest.approx(report.estimate.graphs / 2**20, 0.01)


def test_the_peak_is_that_of_eager_training_steps_if_a_validation_is_captured_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = iter(range(1, 9))
    monkeypatch.setattr(memory_report, "peak_of", lambda device: next(peaks))
    graphs = CudaGraphs("segments", warmup_steps=1, evaluation=True)
    measured = fit(graphs, CONFIGS["gpt2"], 8, validates=True)
    (report,) = measured.reports
    # The sanity check is captured; the first training step is eager, and the second one not.
    assert measured.num_before == 1
    assert report.peak == 1


SUBSETS: list[tuple[str, ...]] = [
    *(("attention",), ("mlp",), ("head",), ("attention", "mlp"), ("mlp", "head")),
    *(("embedding", "head"), ("embedding", "attention", "head")),
]
MIXTURES: list[tuple[str, ...]] = [
    ("combine", "attention"),
    ("router", "preprocess", "experts", "combine"),
]


@pytest.mark.parametrize(
    ("kind", "scopes"),
    [*(("gpt2", one) for one in SUBSETS), *(("experts", one) for one in MIXTURES)],
)
def test_scopes(kind: str, scopes: Any) -> None:
    measured = fit(CudaGraphs("segments", scopes=scopes, warmup_steps=1), CONFIGS[kind], 8)
    (report,) = measured.reports
    assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.1)


def test_an_embedding_alone_has_its_result_and_what_it_adds_up() -> None:
    measured = fit(CudaGraphs("segments", ("embedding",), 1), CONFIGS["gpt2"], 8)
    (report,) = measured.reports
    # The sorted tokens of the backward pass are not counted.
    assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.2)


@pytest.mark.parametrize("mode", ["segments", "full"])
def test_a_captured_validation_needs_no_more(mode: Any) -> None:
    graphs = CudaGraphs(mode, warmup_steps=1, evaluation=True)
    measured = fit(graphs, CONFIGS["experts"], 8, validates=True)
    assert measured.num_before == 1
    (report,) = measured.reports
    assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.08)


def check_stages(rank: int, size: int) -> Collection[tuple[str, Any, int, int]]:
    found = []
    for kind, schedule, mode, recompute in (
        ("gpt2", "1f1b", "segments", "none"),
        ("gpt2", "zb-h1", "segments", "none"),
        ("gpt2", "1f1b", "full", "none"),
        ("gpt2", "1f1b", "segments", "full"),
        ("experts", "1f1b", "segments", "full"),
    ):
        graphs = CudaGraphs(mode, warmup_steps=1)  # type: ignore[arg-type]
        options = {"pp": 2, "schedule": schedule, "recompute": recompute}
        measured = fit(graphs, CONFIGS[kind], 2, size, **options)
        estimate = measured.reports[rank].estimate.graphs
        name = f"{kind} {schedule} {mode} {recompute}"
        found.append((name, estimate, measured.num_bytes, measured.num_pools))
    return found


def test_stages_with_several_microbatches_in_flight() -> None:
    first, last = run_world(check_stages, 2)
    for name, estimate, measured, _ in (*first, *last):
        assert estimate == pytest.approx(measured, rel=0.1), (name, estimate, measured)
    # One pool for each slot, and one for a whole step. Of recomputed layers, all microbatches share
    # the pool; embedding and head have slots.
    assert [num_pools for *_, num_pools in first] == [2, 2, 1, 2 + 1, 2 + 1]
    assert [num_pools for *_, num_pools in last] == [1, 2, 1, 1 + 1, 1 + 1]
