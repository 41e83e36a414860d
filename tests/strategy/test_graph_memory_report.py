"""The memory report estimates the memory that CUDA graphs need for pools and copied inputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from lightning import Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_megatron import CudaGraphs, GPTConfig, MegatronStrategy
from lightning_megatron.graphs.piece_inputs import PieceInputs
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.strategy.callbacks import memory_report
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport
from tests.live_memory import LiveMemory
from tests.strategy.graph_fits import num_graphs_of
from tests.strategy.tiny import TinyLM
from tests.world import run_world

T = TypeVar("T")
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


class OwnMemory(LiveMemory):
    """Live memory of the tensors that operators make, without tensors that existed before."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, Tensor) and argument.untyped_storage()._cdata not in self.sizes:
                storage = argument.untyped_storage()
                self.sizes[storage._cdata] = 0
                weakref.finalize(storage, self._freed, storage._cdata)
        return super().__torch_dispatch__(function, types, args, kwargs)


class MeasuredPool:
    """Pool that tracks the memory that its captures allocate and keep."""

    def __init__(self) -> None:
        self.memory = OwnMemory()

    def give_up(self, tensor: Tensor) -> Tensor:
        """Return another tensor, so that the memory of the first is free."""
        return torch.empty_like(tensor)


class MeasuredGraph:
    """Graph that computes nothing."""

    def replay(self) -> None:
        """Do nothing, because the results are those of the capture."""

    def release(self) -> None:
        """Do nothing."""


class MeasuringBackend:
    """Backend whose captures run eagerly, while their pool tracks its live memory."""

    is_capturing = False

    def __init__(self) -> None:
        self.pools: list[MeasuredPool] = []

    @property
    def num_bytes(self) -> int:
        """Return the sum of the peaks of all pools (bytes)."""
        return sum(pool.memory.peak for pool in self.pools)

    def make_pool(self) -> MeasuredPool:
        """Return a new pool."""
        self.pools.append(MeasuredPool())
        return self.pools[-1]

    def capture(
        self, function: Callable[[], T], pool: Any, generators: Any = None
    ) -> tuple[MeasuredGraph, T]:
        """Run a function, and track its allocations."""
        with pool.memory:
            return MeasuredGraph(), function()


class SizedLM(TinyLM):
    """Train a model of the given configuration."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config


@dataclass
class MeasuringReport(MemoryReport):
    """Memory report that also measures the pools and copied inputs of the graphs.

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

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        inputs = [item for item in gc.get_objects() if type(item) is PieceInputs]
        self.input_bytes = sum(item.num_bytes for item in inputs)

    @property
    def num_bytes(self) -> int:
        """Return the size of the pools and inputs (bytes)."""
        return self.backend.num_bytes + self.input_bytes

    @property
    def num_pools(self) -> int:
        """Return the number of pools that allocated memory."""
        return sum(pool.memory.peak > 0 for pool in self.backend.pools)


def fit(
    graphs: CudaGraphs,
    config: GPTConfig,
    microbatch_size: int,
    devices: int = 1,
    validates: bool = False,
    **options: Any,
) -> MeasuringReport:
    """Train for two steps, and validate first on request; the second step captures graphs."""
    backend = MeasuringBackend()
    strategy = MegatronStrategy(
        microbatch_size=microbatch_size, check_microbatches=False, cuda_graphs=graphs, **options
    )
    strategy._make_backend = lambda mesh: backend
    report = MeasuringReport(backend)
    tokens = torch.randint(0, 128, (16, LENGTH + 1))
    batches = DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in tokens], batch_size=8)
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


@pytest.mark.parametrize(
    ("kind", "mode"), [("gpt2", "segments"), ("llama", "full"), ("experts", "segments")]
)
def test_estimate_matches_measured_graph_memory_of_one_process(kind: str, mode: Any) -> None:
    graphs = CudaGraphs(mode, warmup_steps=1)
    for recompute in ("none", "full", "expert_inputs" if kind == "experts" else "selective"):
        measured = fit(graphs, CONFIGS[kind], 8, recompute=recompute)
        assert measured.num_pools == 1
        (report,) = measured.reports
        assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.08), recompute
        rows = {line.split("  ")[0]: line.split() for line in report.table().splitlines()}
        assert float(rows["CUDA graphs"][2]) == pytest.approx(report.estimate.graphs / 2**20, 0.01)


def test_peak_is_that_of_the_eager_training_step_if_validation_is_captured_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = iter(range(1, 9))
    monkeypatch.setattr(memory_report, "peak_of", lambda device: next(peaks))
    graphs = CudaGraphs("segments", warmup_steps=1, evaluation=True)
    measured = fit(graphs, CONFIGS["gpt2"], 8, validates=True)
    (report,) = measured.reports
    # The sanity check is captured, the first training step is eager, the second is captured.
    assert measured.num_before == 1
    assert report.peak == 1


@pytest.mark.parametrize(
    ("kind", "scopes"),
    [
        ("gpt2", ("attention", "mlp")),
        ("gpt2", ("embedding", "head")),
        ("experts", ("combine", "attention")),
        ("experts", ("router", "preprocess", "experts", "combine")),
    ],
)
def test_estimate_matches_measured_graph_memory_of_scopes(kind: str, scopes: Any) -> None:
    measured = fit(CudaGraphs("segments", scopes=scopes, warmup_steps=1), CONFIGS[kind], 8)
    (report,) = measured.reports
    assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.1)


def test_estimate_matches_measured_graph_memory_after_captured_validation() -> None:
    graphs = CudaGraphs("full", warmup_steps=1, evaluation=True)
    measured = fit(graphs, CONFIGS["experts"], 8, validates=True)
    assert measured.num_before == 1
    (report,) = measured.reports
    assert report.estimate.graphs == pytest.approx(measured.num_bytes, rel=0.08)


def measure_stages(rank: int, size: int) -> Collection[tuple[str, Any, int, int]]:
    results = []
    for kind, schedule, mode, recompute in (
        ("gpt2", "zb-h1", "segments", "none"),
        ("gpt2", "1f1b", "full", "none"),
        ("experts", "1f1b", "segments", "full"),
    ):
        graphs = CudaGraphs(mode, warmup_steps=1)  # type: ignore[arg-type]
        options = {"pp": 2, "schedule": schedule, "recompute": recompute}
        measured = fit(graphs, CONFIGS[kind], 2, size, **options)
        estimate = measured.reports[rank].estimate.graphs
        name = f"{kind} {schedule} {mode} {recompute}"
        results.append((name, estimate, measured.num_bytes, measured.num_pools))
    return results


def test_estimate_matches_graph_memory_of_stages_with_microbatches_in_flight() -> None:
    first, last = run_world(measure_stages, 2)
    for name, estimate, measured, _ in (*first, *last):
        assert estimate == pytest.approx(measured, rel=0.1), (name, estimate, measured)
    # Segments have one pool for each slot, a full-step graph has one pool. All microbatches share
    # the pool of recomputed layers; the embedding and the head have pools for their slots.
    assert [num_pools for *_, num_pools in first] == [2, 1, 2 + 1]
    assert [num_pools for *_, num_pools in last] == [2, 1, 1 + 1]
