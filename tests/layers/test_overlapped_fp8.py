"""8-bit products that overlap with communication equal products without overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import FP8, MegatronStrategy, ParallelPlanError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.fp8.operand import Operand, needed
from lightning_megatron.layers.fp8.overlapped_products import gathered_product, scattered_product
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.models.fp8_layers import set_fp8
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout
from tests.kernels.models import run
from tests.layers.cut_operators import cut_operators
from tests.layers.noted_casts import CONFIGS
from tests.layers.test_fp8_products import draw
from tests.oracles import assert_equal
from tests.world import run_world

#: Of two layers: forward before two column layers, backward before two row layers.
EXPECTED_CALLS = {"fused_all_gather_scaled_matmul": 8, "fused_scaled_matmul_reduce_scatter": 4}


def train(mesh: ParallelMesh, kind: str, recompute: Any, emulate: bool) -> dict[str, Tensor]:
    """Return losses and gradients of a model in 8 bits."""
    model = GPT(CONFIGS[kind], mesh, seed=1).double()
    model.recompute = recompute
    set_fp8(model, FP8(emulate=emulate), emulate, mesh.device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 100, (2, 9), generator=generator)
    return run(model, tokens[:, :-1], tokens[:, 1:].contiguous(), 0.0)


def compare_models(rank: int, size: int) -> None:
    """Compare models whose products overlap with models whose products do not."""
    for layout in ({"tp": 2}, {"tp": 2, "cp": 2})[: size // 2]:
        parallel_layout = ParallelLayout(world_size=size, **layout)
        mesh = ParallelMesh.create(
            parallel_layout, seed=0, sequence_parallel=True, overlaps_matmul=True
        )
        plain = replace(mesh, tp=replace(mesh.tp, overlaps_matmul=False))
        for kind, recompute in (("llama", "none"), ("gpt2", "none"), ("llama", "full")):
            expected = train(plain, kind, recompute, emulate=True)
            with cut_operators() as counts:
                actual = train(mesh, kind, recompute, emulate=False)
            if recompute == "none":
                assert dict(counts) == EXPECTED_CALLS
            assert counts.total() >= sum(EXPECTED_CALLS.values())
            assert actual.keys() == expected.keys()
            for name, value in actual.items():
                assert_equal(value, expected[name], f"{kind}, {recompute}: {name}")
        mesh.destroy()


@pytest.mark.parametrize("size", [2, 4])
def test_models_with_overlap_equal_models_without(size):
    run_world(compare_models, size)


def compare_products(rank: int, size: int) -> None:
    """Compare both products with products of full matrices."""
    mesh = ParallelMesh.create(
        ParallelLayout(world_size=size, tp=size), sequence_parallel=True, overlaps_matmul=True
    )
    scaling = Scaling(FP8(emulate=True), emulate=True)

    def rows(matrix: Tensor) -> Operand:
        return needed(scaling.cast_input(matrix, rows=True, columns=False).rows)

    full_left = rows(draw(8 * size, 32))
    right = rows(draw(48, 32, seed=1))
    local = Operand(full_left.values.chunk(size)[rank].contiguous(), full_left.scale)
    expected = full_left.numbers(torch.float64) @ right.numbers(torch.float64).t()
    left = rows(draw(8 * size, 32, seed=2 + rank))
    partial_product = left.numbers(torch.float64) @ right.numbers(torch.float64).t()
    partial_products = [torch.empty_like(partial_product) for _ in range(size)]
    torch.distributed.all_gather(partial_products, partial_product)
    expected_sum = torch.stack(partial_products).sum(0).chunk(size)[rank]
    for emulate in (True, False):
        with cut_operators() as counts:
            options = {"emulate": emulate}
            gathered, actual = gathered_product(local, right, mesh, torch.float64, **options)
            assert torch.equal(
                gathered.values.view(torch.uint8), full_left.values.view(torch.uint8)
            )
            assert torch.equal(gathered.scale, full_left.scale)
            assert_equal(actual, expected, f"gathered, {emulate}")
            scattered = scattered_product(left, right, mesh, torch.float64, **options)
            assert_equal(scattered, expected_sum, f"scattered, {emulate}")
        # Emulated products do not overlap with communication.
        assert counts.total() == (0 if emulate else 2)
    mesh.destroy()


def test_products_with_overlap_equal_products_of_full_matrices():
    run_world(compare_products, 2)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_recipes_with_several_scales_are_refused(recipe):
    with pytest.raises(
        ParallelPlanError, match="depend on the gathered tensor.*tensorwise or delay"
    ):
        MegatronStrategy(tp=2, overlap_tensor_parallel=True, fp8=recipe)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_recipes_with_one_scale_are_accepted(recipe):
    strategy = MegatronStrategy(tp=2, overlap_tensor_parallel=True, fp8=recipe)
    assert strategy.options.overlap_tensor_parallel
