"""Tests that CUDA graphs of products overlapped with tensor-parallel transfers have eager bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron import CudaGraphs
from lightning_megatron.graphs.backend import collection_paused
from lightning_megatron.graphs.cuda import CudaBackend
from lightning_megatron.groups.collective_matmul import (
    all_gather_matmul,
    matmul_reduce_scatter,
    workspaces,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.cuda_graphs import GraphMode
from lightning_megatron.plan.layout import ParallelLayout
from tests.fits import Job, Report
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.gpu.shared_gpu import gpu_of
from tests.graphs.jobs import VARIED, differences, run_graphs
from tests.optimizer.fused_fits import SMALL

FEATURES = 512
MODES: tuple[GraphMode, ...] = ("segments", "full")


def draw(*shape: int, seed: int) -> Tensor:
    """Return random numbers in bfloat16 on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().cuda()


def replay_products(rank: int, size: int) -> int:
    """Count replayed products that equal eager ones, before and after their shared memory grows."""
    layout = ParallelLayout(size, tp=size)
    mesh = ParallelMesh.create(
        layout, device=gpu_of(rank), sequence_parallel=True, overlaps_matmul=True
    )
    rows = 64
    gathered = draw(rows, 2, FEATURES, seed=rank)
    scattered = draw(size * rows, 2, FEATURES, seed=20 + rank)
    matrix = draw(768, FEATURES, seed=9).t()

    def multiply(x: Tensor = gathered, y: Tensor = scattered) -> tuple[Tensor, Tensor]:
        _, product = all_gather_matmul(x, matrix, mesh.tp, keep=False)
        return product, matmul_reduce_scatter(y, matrix, mesh.tp)

    backend = CudaBackend()
    num_equal = 0
    with torch.cuda.stream(torch.cuda.Stream()), collection_paused():
        multiply()
        graph, results = backend.capture(multiply, backend.make_pool())
        captured_with = workspaces()
        for seed in range(4):
            if seed == 2:
                multiply(draw(8 * rows, 2, FEATURES, seed=1), draw(8 * rows, 2, FEATURES, seed=2))
                assert workspaces()[0].numel() > captured_with[0].numel()
                del captured_with
            gathered.copy_(draw(rows, 2, FEATURES, seed=100 * seed + rank))
            scattered.copy_(draw(size * rows, 2, FEATURES, seed=100 * seed + 20 + rank))
            graph.replay()
            replayed = [product.clone() for product in results]
            eager = multiply()
            num_equal += sum(torch.equal(*pair) for pair in zip(replayed, eager, strict=True))
        graph.release()
    mesh.destroy()
    return num_equal


@on_two_and_four_gpus
def test_replayed_products_equal_eager_products_after_their_shared_memory_grows(size):
    why = "products of several ranks transfer their pieces"
    assert run_ranks(replay_products, size, needs_nccl=why) == [8] * size


def train(graphs: CudaGraphs | None, size: int) -> Report:
    """Train twelve steps in bfloat16 with overlapped products."""
    layout = {"tp": size, "linear.overlap": True}
    wide = replace(SMALL, hidden_size=64)
    job = Job(wide, layout, "bf16-mixed", 12, {"accelerator": "gpu"}, VARIED)
    return run_graphs(job, graphs, size)


def compare_trainings(rank: int, size: int) -> list[str]:
    """Return the modes of graphs whose trainings differ where two eager trainings agree."""
    eager = train(None, size)
    repeated = set(differences(train(None, size), eager))
    differing: list[str] = []
    for mode in MODES:
        captured: Any = train(CudaGraphs(mode, on_failure="error"), size)
        assert captured.graphs[-1] > 0, mode
        if not set(differences(captured, eager)) <= repeated:
            differing.append(mode)
    return differing


@on_two_and_four_gpus
def test_trainings_by_graphs_have_the_bits_of_eager_trainings(size):
    why = "a capture on several ranks has collectives in it"
    assert run_ranks(compare_trainings, size, needs_nccl=why) == [[]] * size
