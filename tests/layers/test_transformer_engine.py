"""Layers that use Transformer Engine equal those of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.gradient_slot import GradientSlot, StackedSlot, set_slot
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.transformer_engine.engine_regions import engine_column_linear
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.layered import single_mesh
from lightning_megatron.plan.layout import ParallelLayout
from tests.layers.fake_engine import installed
from tests.layers.test_fp8_products import draw
from tests.world import run_world

CPU = torch.device("cpu")


def output_and_gradients(module: Any, hidden: Tensor, seed: int) -> list[Tensor]:
    """Return the output and all gradients of a layer."""
    hidden = hidden.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    output = module(hidden)
    output.backward(draw(*output.shape, seed=seed))
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in module.parameters())]


def differences(rank: int, size: int, sequence_parallel: bool) -> list[float]:
    """Return the largest differences between layers with and without the library on this rank."""
    layout = ParallelLayout(size, tp=size)
    mesh = ParallelMesh.create(layout, sequence_parallel=sequence_parallel)
    largest_differences = []
    with installed():
        for kind, features in ((ColumnParallelLinear, (16, 24)), (RowParallelLinear, (32, 8))):
            module = kind(*features, mesh).double()
            with torch.no_grad():
                for seed, parameter in enumerate(module.parameters()):
                    parameter.copy_(
                        draw(*parameter.shape, seed=seed + (10 * rank + 3) * (not seed))
                    )
            is_column = kind is ColumnParallelLinear
            length = 4 // size if sequence_parallel and is_column else 4
            width = features[0] if is_column else features[0] // size
            hidden = draw(length, 3, width, seed=rank if sequence_parallel or not is_column else 5)
            expected = output_and_gradients(module, hidden, 7)
            module.scaling = EngineScaling(None, CPU)
            actual = output_and_gradients(module, hidden, 7)
            largest_differences += [
                float((a - b).abs().max()) for a, b in zip(expected, actual, strict=True)
            ]
    return largest_differences


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_engine_layers_of_two_ranks_equal_those_of_this_package(sequence_parallel):
    for largest_differences in run_world(differences, 2, sequence_parallel):
        assert len(largest_differences) == 8
        assert max(largest_differences) < 1e-12


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_engine_layers_add_weight_gradients_to_slots(is_split, scale):
    sums = torch.full((24, 16), 7.0, dtype=torch.float64)
    part_slots = [GradientSlot(part, lambda: None, scale=scale) for part in sums.split([8, 16])]
    full_slot = GradientSlot(sums, lambda: None, scale=scale)
    expected = torch.zeros_like(sums)
    with installed():
        for seed in range(2):
            weight = draw(24, 16, seed=3).requires_grad_()
            set_slot(weight, StackedSlot(part_slots, [8, 16]) if is_split else full_slot)
            hidden = draw(5, 16, seed=seed).requires_grad_()
            output = engine_column_linear(
                hidden, weight, None, single_mesh(0), EngineScaling(None, CPU)
            )
            output.backward(draw(5, 24, seed=seed + 9))
            expected += scale * draw(5, 24, seed=seed + 9).t() @ hidden.detach()
            assert weight.grad is None
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms", "rms with offset"])
def test_engine_norms_equal_those_of_this_package(kind):
    mesh = single_mesh(0)
    norm: Any = {
        "layer": lambda: LayerNorm(16, mesh),
        "layer without bias": lambda: LayerNorm(16, mesh, bias=False),
        "rms": lambda: RMSNorm(16, mesh),
        "rms with offset": lambda: RMSNorm(16, mesh, offset=1.0),
    }[kind]().double()
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(draw(1, 16, seed=seed)[0])
    expected_results = output_and_gradients(norm, draw(3, 4, 16, seed=2), 5)
    norm.uses_engine = True
    with installed():
        actual_results = output_and_gradients(norm, draw(3, 4, 16, seed=2), 5)
    for expected, actual in zip(expected_results, actual_results, strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-10, atol=1e-10)


def test_norms_with_an_unsupported_offset_do_not_call_the_library():
    norm = RMSNorm(16, single_mesh(0), offset=0.5).double()
    norm.uses_engine = True
    # Without the stand-in, a call of the library would fail.
    assert norm(draw(4, 16)).shape == (4, 16)


def test_compiled_layers_with_the_library_equal_those_of_this_package():
    module = torch.nn.Sequential(
        RMSNorm(16, single_mesh(0)), ColumnParallelLinear(16, 8, single_mesh(0), bias=False)
    ).double()
    with torch.no_grad():
        module[1].weight.copy_(draw(8, 16, seed=1))
    expected_results = output_and_gradients(module, draw(5, 16), 3)
    module[0].uses_engine = True
    module[1].scaling = EngineScaling(None, CPU)
    with installed():
        compiled = output_and_gradients(torch.compile(module, backend="eager"), draw(5, 16), 3)
    assert len(compiled) == len(expected_results) == 4
    for actual, expected in zip(compiled, expected_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
