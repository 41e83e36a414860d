"""Test of all-reduces of small tensors by one kernel, on GPUs that write to each other's memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.choose_kernels import choose_kernels
from lightning_megatron.layers.one_shot import MAX_BYTES, one_shot_all_reduce_
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.shared_gpu import gpu_of, require_gpus
from tests.kernels.one_shot_checks import CASES, check_one_shot, drawn, reduced
from tests.world import run_world

NUM_REPLAYS = 40


def reduce_by_operation(x: Tensor, axis: MeshAxis, op: str) -> None:
    if op == "max":
        one_shot_all_reduce_(x, axis, "max")
    else:
        one_shot_all_reduce_(x, axis, "sum")


def check_replays(axis: MeshAxis, device: torch.device) -> None:
    """Compare reductions in a replayed graph, with changing inputs and one late rank per replay."""
    inputs = [drawn(axis.rank, case, device) for case in range(len(CASES))]

    def run() -> list[Tensor]:
        results = [tensor.clone() for tensor in inputs]
        for result, (_, _, op) in zip(results, CASES, strict=True):
            reduce_by_operation(result, axis, op)
        return results

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = run()
    expected = [reduced(axis.size, case, device) for case in range(len(CASES))]
    for replay in range(NUM_REPLAYS):
        for tensor, (_, _, op) in zip(inputs, CASES, strict=True):
            # A change of the sign does not affect rounding; inputs of maxima become other numbers.
            if op == "sum":
                tensor.mul_(-1)
            else:
                tensor.bitwise_xor_(1)
        if replay % axis.size == axis.rank:
            torch.cuda._sleep(300_000)
        graph.replay()
        for case, (result, reference) in enumerate(zip(results, expected, strict=True)):
            if CASES[case][2] == "sum":
                assert torch.equal(result, reference if replay % 2 else -reference), (
                    replay,
                    CASES[case],
                )
            elif replay % 2:
                assert torch.equal(result, reference), (replay, CASES[case])


def check_ranks(rank: int, size: int) -> tuple[int, int]:
    device = gpu_of(rank)
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), device=device)
    kernels = choose_kernels(device).kernels
    assert kernels is not None
    with mock.patch.object(
        kernels, "reduce_one_shot_", side_effect=kernels.reduce_one_shot_
    ) as kernel:
        check_one_shot(rank, size, lambda x, op: reduce_by_operation(x, mesh.tp, op), device)
        num_kernels = kernel.call_count
        large = torch.ones(MAX_BYTES // 4 + 1, device=device)
        assert torch.equal(one_shot_all_reduce_(large, mesh.tp, "sum"), large)
        assert float(large[-1]) == size
        num_large = kernel.call_count - num_kernels
    check_replays(mesh.tp, device)
    mesh.destroy()
    return num_kernels, num_large


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
def test_small_all_reduces_equal_reductions_in_the_order_of_ranks(size: int) -> None:
    require_gpus(size, needs_nccl="a late rank would hold up the only GPU")
    assert run_world(check_ranks, size, backend="nccl") == [(3 * len(CASES), 0)] * size
