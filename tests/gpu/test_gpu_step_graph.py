"""Tests that graphs of full steps on GPUs have the bits of eager steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import MegatronStrategy, UnsupportedError
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.shared_gpu import require_gpus
from tests.graphs.whole_fits import LM, Shown, assert_equal, fit
from tests.world import run_world
from tests.worlds import test_graph_readers as updates

pytestmark = pytest.mark.gpu

FULL = CudaGraphs("full", warmup_steps=2)
GPU: dict[str, Any] = {"accelerator": "gpu", "precision": "bf16-mixed", "deterministic": True}


@pytest.fixture(autouse=True)
def restore_determinism() -> Iterator[None]:
    """Allow operators that are not deterministic in later tests."""
    yield
    torch.use_deterministic_algorithms(False)


def fit_on_stream(*args: Any, **options: Any) -> Shown:
    """Fit on a stream that can be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return fit(*args, backend=lambda mesh: CudaBackend(), **{**GPU, **options})


@pytest.mark.parametrize("kind", ["gpt2", "llama", "experts"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["each", "third"])
def test_replayed_steps_have_the_bits_of_eager_steps(kind: str, options: dict[str, Any]) -> None:
    first = fit_on_stream(LM(kind), None, num_samples=80, **options)
    eager = fit_on_stream(LM(kind), None, num_samples=80, **options)
    assert_equal(first, eager, "two eager runs agree")
    graphs = fit_on_stream(LM(kind), FULL, num_samples=80, **options)
    assert_equal(graphs, eager, kind)
    assert graphs.num_replays >= 16, graphs.said


def test_the_scale_of_the_loss_may_change_between_replays() -> None:
    eager, graphs = (
        fit_on_stream(LM("llama"), settings, num_samples=80, precision="16-mixed")
        for settings in (None, FULL)
    )
    assert_equal(graphs, eager)
    assert graphs.num_replays == 18, graphs.said


class ReadingLM(LM):
    """Read the loss in the step, which waits for the device."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"].item()
        return output


def test_a_step_that_waits_for_the_device_continues_eagerly() -> None:
    eager, graphs = fit_on_stream(ReadingLM("gpt2"), None), fit_on_stream(ReadingLM("gpt2"), FULL)
    assert_equal(graphs, eager)
    assert graphs.num_replays == 0
    assert "not permitted when stream is capturing" in graphs.said[0]


def test_draws_from_the_cpu_generator_are_refused_inside_random_streams() -> None:
    streams = RandomStreams(3, device="cuda")
    backend = CudaBackend()
    pool = GeneratorPool(torch.device("cuda"), 1)

    def step() -> None:
        with streams.recording(pool), streams.fork_default():
            torch.rand(3)

    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(UnsupportedError, match="CPU generator"),
    ):
        backend.capture(step, backend.make_pool(), pool)


CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "dp2": ("gpt2", {}),
        "pp2": ("gpt2", {"pp": 2}),
        "pp2 vpp2": ("llama", {"pp": 2, "vpp": 2}),
        "tp2": ("gpt2", {"tp": 2}),
    },
    4: {"pp2 dp2": ("gpt2", {"pp": 2}), "tp2 dp2": ("llama", {"tp": 2})},
}


def _world(rank: int, size: int) -> None:
    for name, (kind, sizes) in CASES[size].items():
        layout = ParallelLayout(size, tp=sizes.get("tp", 1), pp=sizes.get("pp", 1))
        fits = []
        for settings in (None, FULL):
            strategy = MegatronStrategy(microbatch_size=2, **sizes)
            module = LM(kind, num_layers=4)
            data = (layout.coordinates(rank)["dp"], layout.dp)
            options: dict[str, Any] = {"devices": size, "strategy": strategy, "data": data}
            fits.append(fit_on_stream(module, settings, num_samples=80 * layout.dp, **options))
        assert_equal(fits[1], fits[0], name)
        assert fits[1].num_replays >= 14, (name, fits[1].said)


@pytest.mark.parametrize("size", CASES)
def test_replayed_steps_of_several_ranks_have_the_bits_of_eager_steps(size: int) -> None:
    require_gpus(size, needs_nccl="a captured step holds collectives")
    run_world(_world, size, backend="nccl")


def _reading(rank: int, size: int, folder: Path) -> dict[str, tuple[set[str], set[str], bool]]:
    differences = {}
    options = {"accelerator": "gpu", "deterministic": True}
    for name, (job, _) in updates.CASES.items():
        on_gpu = replace(job, precision="bf16-mixed", trainer={**job.trainer, **options})
        first, second, graphs = (
            updates.fit_reading(folder / name / place, is_captured, on_gpu)
            for place, is_captured in (("first", False), ("second", False), ("graphs", True))
        )
        repeated = updates.differences(second, first)
        gathers = "gathers" in graphs.outcomes["kinds"]
        differences[name] = repeated, updates.differences(graphs, first), gathers
    return differences


def test_graphs_of_two_ranks_gather_and_sum_like_eager_steps(tmp_path: Path) -> None:
    require_gpus(2, needs_nccl="a captured step holds collectives")
    for differences in run_world(_reading, 2, tmp_path, backend="nccl"):
        for name, (repeated, by_graphs, gathers) in differences.items():
            assert by_graphs <= repeated, name
            assert gathers == name.startswith("dp2"), name
