"""Test of all-reduces of small tensors by one kernel, on GPUs that write to each other's memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fused.choose_kernels import choose_kernels
from lightning_megatron.layers.fused.one_shot import MAX_BYTES, one_shot_all_reduce_
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.grouped import captured
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.gpu.shared_gpu import gpu_of
from tests.kernels.one_shot_checks import CASES, check_one_shot, drawn, reduced


def check_replays(axis: MeshAxis, device: torch.device) -> None:
    """Compare reductions in a replayed graph, with changing inputs and one late rank per replay."""
    inputs = [drawn(axis.rank, case, device) for case in range(len(CASES))]

    def run() -> list[Tensor]:
        results = [tensor.clone() for tensor in inputs]
        for result, (_, _, op) in zip(results, CASES, strict=True):
            one_shot_all_reduce_(result, axis, op)  # type: ignore[arg-type]
        return results

    graph, results = captured(run, stream=torch.cuda.Stream())
    expected = [reduced(axis.size, case, device) for case in range(len(CASES))]
    for replay in range(40):
        for tensor, (_, _, op) in zip(inputs, CASES, strict=True):
            # A change of the sign does not affect rounding; inputs of maxima become other numbers.
            if op == "sum":
                tensor.mul_(-1)
            else:
                tensor.bitwise_xor_(1)
        if replay % axis.size == axis.rank:
            torch.cuda._sleep(300_000)
        graph.replay()
        is_original = bool(replay % 2)
        for case, result, reference in zip(CASES, results, expected, strict=True):
            if case[2] == "sum":
                assert torch.equal(result, reference if is_original else -reference), (replay, case)
            elif is_original:
                assert torch.equal(result, reference), (replay, case)


def check_ranks(rank: int, size: int) -> tuple[int, int]:
    device = gpu_of(rank)
    mesh = ParallelMesh.create(ParallelLayout(size, tp=size), device=device)
    kernels: Any = choose_kernels(device).kernels
    assert kernels is not None

    def reduce(x: Tensor, op: Any) -> None:
        one_shot_all_reduce_(x, mesh.tp, op)

    with mock.patch.object(
        kernels, "reduce_one_shot_", side_effect=kernels.reduce_one_shot_
    ) as kernel:
        check_one_shot(rank, size, reduce, device)
        num_kernels = kernel.call_count
        large = torch.ones(MAX_BYTES // 4 + 1, device=device)
        assert torch.equal(one_shot_all_reduce_(large, mesh.tp, "sum"), large)
        assert float(large[-1]) == size
        num_large = kernel.call_count - num_kernels
    check_replays(mesh.tp, device)
    mesh.destroy()
    return num_kernels, num_large


@on_two_and_four_gpus
def test_small_all_reduces_equal_reductions_in_the_order_of_ranks(size):
    why = "a late rank would hold up the only GPU"
    assert run_ranks(check_ranks, size, needs_nccl=why) == [(3 * len(CASES), 0)] * size
