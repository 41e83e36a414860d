"""Tests of gradient slots and pipelined products on GPUs, where their fast implementations run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.fp8.operand import needed
from lightning_megatron.layers.fp8.overlapped_products import gathered_product, scattered_product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.gradient_slot import GradientSlot, set_slot
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.shared_gpu import gpu_of, require_gpus
from tests.oracles import assert_equal
from tests.world import run_world


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.gpu
def test_float32_slots_sum_half_precision_products_without_rounding() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    mesh = ParallelMesh.single("cuda")
    layer = ColumnParallelLinear(256, 384, mesh).bfloat16().cuda()
    torch.nn.init.normal_(layer.weight, std=0.02)
    slots = {}
    for name, parameter in layer.named_parameters():
        slots[name] = torch.full_like(parameter, torch.nan, dtype=torch.float32)
        set_slot(parameter, GradientSlot(slots[name], lambda: None))
    weight, bias = torch.zeros(384, 256, dtype=torch.float64), torch.zeros(384, dtype=torch.float64)
    for seed in range(3):
        x, grad = _draw(512, 4, 256, seed=seed), _draw(512, 4, 384, seed=seed + 9)
        layer(x).backward(grad)
        rows, inputs = grad.cpu().double().flatten(0, 1), x.cpu().double().flatten(0, 1)
        weight += rows.t() @ inputs
        bias += rows.sum(0)
    assert_equal(slots["weight"].cpu().double(), weight, "weight", tolerance=1e-5)
    assert_equal(slots["bias"].cpu().double(), bias, "bias", tolerance=1e-5)


@pytest.mark.gpu
def test_the_gradient_of_the_embedding_has_the_same_bits_in_every_run() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    mesh, slots = ParallelMesh.single("cuda"), []
    tokens = (
        (torch.rand(4, 2048, generator=torch.Generator().manual_seed(0)) ** 4 * 1000).long().cuda()
    )
    grad = _draw(2048, 4, 512, seed=1)
    for _ in range(3):
        layer = VocabParallelEmbedding(1000, 512, mesh).bfloat16().cuda()
        torch.nn.init.normal_(layer.weight)
        slot = torch.full_like(layer.weight, torch.nan, dtype=torch.float32)
        set_slot(layer.weight, GradientSlot(slot, lambda: None))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(tokens).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        slots.append(slot)
    assert torch.equal(slots[0], slots[1])
    assert torch.equal(slots[0], slots[2])
    expected = torch.zeros(1024, 512, dtype=torch.float64)
    expected.index_add_(0, tokens.t().flatten().cpu(), grad.flatten(0, 1).cpu().double())
    assert_equal(slots[0].cpu().double(), expected, "embedding", tolerance=1e-5)


def _products(rank: int, size: int) -> None:
    layout = ParallelLayout(size, tp=size)
    mesh = ParallelMesh.create(
        layout, device=gpu_of(rank), sequence_parallel=True, overlaps_matmul=True
    )
    plain, pipelined = replace(mesh.tp, overlaps_matmul=False), mesh.tp
    for rows in (64, 256):
        x, matrix = _draw(rows, 2, 512, seed=rank), _draw(768, 512, seed=9).t()
        full, product = all_gather_matmul(x, matrix, plain, keep=True)
        for keep in (True, False):
            gathered, pipelined_product = all_gather_matmul(x, matrix, pipelined, keep=keep)
            assert_equal(
                pipelined_product.float(),
                product.float(),
                f"gathered product, rank {rank}",
                tolerance=1e-2,
            )
            if keep:
                assert gathered is not None
                assert full is not None
                assert torch.equal(gathered, full)
        y = _draw(size * rows, 2, 512, seed=20 + rank)
        expected, actual = (
            matmul_reduce_scatter(y, matrix, plain),
            matmul_reduce_scatter(y, matrix, pipelined),
        )
        assert_equal(
            actual.float(), expected.float(), f"scattered product, rank {rank}", tolerance=2e-2
        )
        assert torch.equal(actual, matmul_reduce_scatter(y, matrix, pipelined))
    mesh.destroy()


def _scaled_products(rank: int, size: int) -> None:
    layout = ParallelLayout(size, tp=size)
    mesh = ParallelMesh.create(
        layout, device=gpu_of(rank), sequence_parallel=True, overlaps_matmul=True
    )
    plain = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=False))
    ours = Scaling(FP8("tensorwise"), emulate=False)
    right = needed(ours.cast_weight(_draw(768, 512, seed=9), rows=True, columns=False).rows)
    for rows in (64, 256):
        for cast, fast in ((ours.cast_input, True), (ours.cast_gradient, False)):
            options: dict[str, bool] = {"emulate": False, "fast": fast}
            axes: dict[str, Any] = {"rows": True, "columns": False, "row_axes": (mesh.tp,)}
            local = needed(cast(_draw(rows, 512, seed=rank), **axes).rows)
            full, product = gathered_product(local, right, plain, torch.bfloat16, **options)
            gathered, pipelined_product = gathered_product(
                local, right, mesh, torch.bfloat16, **options
            )
            assert torch.equal(gathered.values.view(torch.uint8), full.values.view(torch.uint8))
            assert torch.equal(gathered.scale, full.scale)
            exact = full.numbers(torch.float64) @ right.numbers(torch.float64).t()
            for actual_product in (product, pipelined_product):
                assert_equal(
                    actual_product.double(), exact, f"gathered, rank {rank}", tolerance=1e-2
                )
            left = needed(cast(_draw(size * rows, 512, seed=20 + rank), **axes).rows)
            expected = scattered_product(left, right, plain, torch.bfloat16, **options)
            actual = scattered_product(left, right, mesh, torch.bfloat16, **options)
            assert actual.shape == expected.shape == (rows, 768)
            assert_equal(
                actual.float(), expected.float(), f"scattered, rank {rank}", tolerance=2e-2
            )
            repeated = scattered_product(left, right, mesh, torch.bfloat16, **options)
            assert torch.equal(actual, repeated)
    mesh.destroy()


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
def test_pipelined_products_in_eight_bits_equal_plain_products(size: int) -> None:
    require_gpus(size)
    run_world(_scaled_products, size, backend="nccl")


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
def test_pipelined_products_equal_plain_products(size: int) -> None:
    require_gpus(size)
    run_world(_products, size, backend="nccl")
