"""Tests that dropout on a GPU drops the elements that it drops on a CPU, also in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.generators import GeneratorPool
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.dropout import WeightDropout, hidden_dropout

pytestmark = pytest.mark.gpu

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def mesh_on(device: str, step: int = 3) -> ParallelMesh:
    mesh = ParallelMesh.single(device, seed=4)
    begin(mesh, step)
    return mesh


def begin(mesh: ParallelMesh, step: int) -> None:
    mesh.random.begin_microbatch(step, 0, (6, 2, 3))
    mesh.random.seek(2)


def results(mesh: ParallelMesh, values: Tensor) -> list[Tensor]:
    """Drop elements twice and weights once; return the results and the gradient, on the CPU."""
    given = values.to(mesh.device).requires_grad_()
    first = hidden_dropout(given, 0.1, True, mesh)
    second = hidden_dropout(first * 2.0, 0.5, True, mesh)
    weights = WeightDropout(mesh, 3)(second.unflatten(-1, (4, -1)).permute(1, 2, 0, 3), 0.3)
    (gradient,) = torch.autograd.grad(weights.sum(), given)
    return [tensor.detach().cpu() for tensor in (first, second, weights, gradient)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 132), (64, 6, 1024), (7, 3, 4800)])
def test_a_gpu_drops_the_elements_that_a_cpu_drops(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = results(mesh_on("cuda"), values)
    expected = results(mesh_on("cpu"), values)
    for on_gpu, on_cpu in zip(actual, expected, strict=True):
        assert torch.equal(on_gpu, on_cpu)
        assert on_gpu.any()
        assert (on_gpu == 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_replays_of_a_graph_drop_what_eager_steps_drop(dtype):
    values = torch.randn(16, 3, 256, device="cuda", dtype=dtype)
    mesh = mesh_on("cuda")
    given = values.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        mesh.random.seek(2)
        output = hidden_dropout(hidden_dropout(given, 0.1, True, mesh) * 3.0, 0.2, True, mesh)
        (gradient,) = torch.autograd.grad(output.square().sum(), given)
        return output.detach(), gradient

    eager = []
    for number in range(4):
        begin(mesh, number)
        eager.append(step())
    begin(mesh, 0)
    pool = GeneratorPool(mesh.device, 0, num_keys=2)
    graph = torch.cuda.CUDAGraph()
    with mesh.random.recording(pool) as recorder, torch.cuda.graph(graph):
        captured = step()
    for number in (3, 1, 2):
        begin(mesh, number)
        mesh.random.seed_generators(recorder.recorded)
        graph.replay()
        for actual, expected in zip(captured, eager[number], strict=True):
            assert torch.equal(actual, expected)
