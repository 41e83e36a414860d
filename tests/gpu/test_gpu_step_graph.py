"""Tests that graphs of full steps on GPUs have the bits of eager steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import GPTConfig
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from tests.fits import LLAMA, Job, Language, Report
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.graphs.jobs import DROPOUT, ROUTED, VARIED, differences, run_graphs
from tests.graphs.test_step_graph import counted_steps
from tests.worlds import test_graph_readers as updates

pytestmark = pytest.mark.gpu

FULL = CudaGraphs("full", warmup_steps=2)
GPU: dict[str, Any] = {"accelerator": "gpu", "deterministic": True}
LLAMA_SMALL = replace(LLAMA, num_layers=2)
MODELS = {"gpt2": DROPOUT, "llama": LLAMA_SMALL, "experts": ROUTED}


@pytest.fixture(autouse=True)
def restore_determinism() -> Iterator[None]:
    """Allow operators that are not deterministic in later tests."""
    yield
    torch.use_deterministic_algorithms(False)


def fit_on_gpu(
    model: Any, graphs: CudaGraphs | None, size: int = 1, **options: Any
) -> tuple[Report, list[str], int]:
    """Train twenty steps; return also what users are told, and the number of replays."""
    trainer = {**GPU, "gradient_clip_val": None, **options.pop("trainer", {})}
    settings = {"precision": "bf16-mixed", "steps": 20, "data": VARIED, **options}
    job = Job(model, **settings, trainer=trainer)
    with counted_steps() as (texts, replays):
        return run_graphs(job, graphs, size), texts, len(replays)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batches", [1, 3])
def test_replayed_steps_have_the_bits_of_eager_steps(kind, batches):
    options: Any = {"trainer": {"accumulate_grad_batches": batches}, "steps": 21 // batches}
    first, eager, (graphs, said, num_replays) = (
        fit_on_gpu(MODELS[kind], settings, **options) for settings in (None, None, FULL)
    )
    assert differences(first[0], eager[0]) == [], "two eager runs agree"
    assert differences(graphs, eager[0]) == [], kind
    assert num_replays >= 16, said


def test_the_scale_of_the_loss_may_change_between_replays():
    eager, (graphs, said, num_replays) = (
        fit_on_gpu(LLAMA_SMALL, settings, precision="16-mixed") for settings in (None, FULL)
    )
    assert differences(graphs, eager[0]) == []
    assert num_replays == 18, said


class Reading(Language):
    """Read the loss in the step, which waits for the device."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


def test_a_step_that_waits_for_the_device_continues_eagerly():
    model = partial(Reading, DROPOUT)
    eager, (graphs, said, num_replays) = (
        fit_on_gpu(model, settings, steps=7) for settings in (None, FULL)
    )
    assert differences(graphs, eager[0]) == []
    assert num_replays == 0
    assert "not permitted when stream is capturing" in said[0]


def test_draws_from_the_cpu_generator_are_refused_inside_random_streams():
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


CASES: dict[int, dict[str, tuple[GPTConfig, dict[str, Any]]]] = {
    2: {
        "dp2": (DROPOUT, {}),
        "pp2": (DROPOUT, {"pp": 2}),
        "pp2 vpp2": (LLAMA, {"pp": 2, "vpp": 2}),
        "tp2": (DROPOUT, {"tp": 2}),
    },
    4: {"pp2 dp2": (DROPOUT, {"pp": 2}), "tp2 dp2": (LLAMA, {"tp": 2})},
}


def _world(rank: int, size: int) -> None:
    for name, (model, layout) in CASES[size].items():
        eager, (graphs, said, num_replays) = (
            fit_on_gpu(model, settings, size, strategy=layout, batch=16)
            for settings in (None, FULL)
        )
        assert differences(graphs, eager[0]) == [], name
        assert num_replays >= 14, (name, said)


@on_two_and_four_gpus
def test_replayed_steps_of_several_ranks_have_the_bits_of_eager_steps(size):
    run_ranks(_world, size, needs_nccl="a captured step holds collectives")


def _reading(rank: int, size: int, folder: Path) -> dict[str, tuple[set[str], set[str], bool]]:
    outcomes = {}
    options = {"accelerator": "gpu", "deterministic": True}
    for name, (job, _) in updates.CASES.items():
        on_gpu = replace(job, precision="bf16-mixed", trainer={**job.trainer, **options})
        first, second, graphs = (
            updates.fit_reading(folder / name / place, is_captured, on_gpu)
            for place, is_captured in (("first", False), ("second", False), ("graphs", True))
        )
        repeated = updates.differences(second, first)
        gathers = "gathers" in graphs.outcomes["kinds"]
        outcomes[name] = repeated, updates.differences(graphs, first), gathers
    return outcomes


@pytest.mark.gpu2
def test_graphs_of_two_ranks_gather_and_sum_like_eager_steps(tmp_path):
    why = "a captured step holds collectives"
    for outcomes in run_ranks(_reading, 2, tmp_path, needs_nccl=why):
        for name, (repeated, by_graphs, gathers) in outcomes.items():
            assert by_graphs <= repeated, name
            assert gathers == name.startswith("dp2"), name
