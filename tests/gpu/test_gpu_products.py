"""Tests of gradient slots and pipelined products on GPUs, where their fast implementations run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.fp8.operand import needed
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear.fp8_products import gathered_product, scattered_product
from lightning_megatron.layers.linear.linear import ColumnParallelLinear
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, set_slot
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.plan.layout import ParallelLayout
from tests.gpu.ranks import on_two_and_four_gpus, run_ranks
from tests.gpu.shared_gpu import gpu_of
from tests.oracles import assert_equal


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.gpu
def test_float32_slots_sum_half_precision_products_without_rounding():
    layer = ColumnParallelLinear(256, 384, ParallelMesh.single("cuda")).bfloat16().cuda()
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
def test_the_gradient_of_the_embedding_has_the_same_bits_in_every_run():
    tokens = torch.rand(4, 2048, generator=torch.Generator().manual_seed(0)) ** 4 * 1000
    tokens, grad, slots = tokens.long().cuda(), _draw(2048, 4, 512, seed=1), []
    for _ in range(3):
        layer = VocabParallelEmbedding(1000, 512, ParallelMesh.single("cuda")).bfloat16().cuda()
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


def _meshes(rank: int, size: int) -> tuple[ParallelMesh, ParallelMesh]:
    """Return a mesh without and one with overlap of products and transfers."""
    layout = ParallelLayout(size, tp=size)
    mesh = ParallelMesh.create(
        layout, device=gpu_of(rank), sequence_parallel=True, overlaps_matmul=True
    )
    return replace(mesh, tp=replace(mesh.tp, overlaps_matmul=False)), mesh


def _products(rank: int, size: int) -> None:
    plain, pipelined = _meshes(rank, size)
    for rows in (64, 256):
        x, matrix = _draw(rows, 2, 512, seed=rank), _draw(768, 512, seed=9).t()
        full, expected = all_gather_matmul(x, matrix, plain.tp, keep=True)
        for keep in (True, False):
            gathered, actual = all_gather_matmul(x, matrix, pipelined.tp, keep=keep)
            assert_equal(actual.float(), expected.float(), f"gathered, rank {rank}", tolerance=1e-2)
            if keep:
                assert gathered is not None
                assert full is not None
                assert torch.equal(gathered, full)
        y = _draw(size * rows, 2, 512, seed=20 + rank)
        expected = matmul_reduce_scatter(y, matrix, plain.tp)
        actual = matmul_reduce_scatter(y, matrix, pipelined.tp)
        assert_equal(actual.float(), expected.float(), f"scattered, rank {rank}", tolerance=2e-2)
        assert torch.equal(actual, matmul_reduce_scatter(y, matrix, pipelined.tp))
    pipelined.destroy()


def _scaled_products(rank: int, size: int) -> None:
    plain, mesh = _meshes(rank, size)
    ours = Scaling(FP8("tensorwise"), emulate=False)
    right = needed(ours.cast_weight(_draw(768, 512, seed=9), rows=True, columns=False).rows)
    axes: dict[str, Any] = {"rows": True, "columns": False, "row_axes": (mesh.tp,)}
    for rows in (64, 256):
        uses: list[tuple[Any, bool]] = [("input", True), ("gradient", False)]
        for use, fast in uses:
            cast = partial(ours.cast, use=use)
            options: dict[str, Any] = {"emulate": False, "fast": fast}
            local = needed(cast(_draw(rows, 512, seed=rank), **axes).rows)
            full, product = gathered_product(local, right, plain, torch.bfloat16, **options)
            gathered, pipelined = gathered_product(local, right, mesh, torch.bfloat16, **options)
            assert torch.equal(gathered.values.view(torch.uint8), full.values.view(torch.uint8))
            assert torch.equal(gathered.scale, full.scale)
            exact = full.numbers(torch.float64) @ right.numbers(torch.float64).t()
            for actual in (product, pipelined):
                assert_equal(actual.double(), exact, f"gathered, rank {rank}", tolerance=1e-2)
            left = needed(cast(_draw(size * rows, 512, seed=20 + rank), **axes).rows)
            expected = scattered_product(left, right, plain, torch.bfloat16, **options).float()
            actual = scattered_product(left, right, mesh, torch.bfloat16, **options)
            assert actual.shape == expected.shape == (rows, 768)
            assert_equal(actual.float(), expected, f"scattered, rank {rank}", tolerance=2e-2)
            repeated = scattered_product(left, right, mesh, torch.bfloat16, **options)
            assert torch.equal(actual, repeated)
    mesh.destroy()


@on_two_and_four_gpus
@pytest.mark.parametrize("products", [_products, _scaled_products], ids=["half", "eight bits"])
def test_pipelined_products_equal_plain_products(products, size):
    run_ranks(products, size)
