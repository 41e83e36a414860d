"""Layers call Transformer Engine with the right matrices, and communicate as our own do."""

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


def results(module: Any, hidden: Tensor, seed: int) -> list[Tensor]:
    """Return the output and all gradients of a layer."""
    hidden = hidden.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    output = module(hidden)
    output.backward(draw(*output.shape, seed=seed))
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *(one.grad for one in module.parameters())]


def differences(rank: int, size: int, shards: bool) -> list[float]:
    """Return how far layers with the library are from those without it, on one of two ranks."""
    layout = ParallelLayout(size, tp=size)
    mesh = ParallelMesh.create(layout, sequence_parallel=shards)
    found = []
    with installed():
        for kind, features in ((ColumnParallelLinear, (16, 24)), (RowParallelLinear, (32, 8))):
            module = kind(*features, mesh).double()
            with torch.no_grad():
                for seed, parameter in enumerate(module.parameters()):
                    parameter.copy_(
                        draw(*parameter.shape, seed=seed + (10 * rank + 3) * (not seed))
                    )
            is_column = kind is ColumnParallelLinear
            length = 4 // size if shards and is_column else 4
            width = features[0] if is_column else features[0] // size
            hidden = draw(length, 3, width, seed=rank if shards or not is_column else 5)
            own = results(module, hidden, 7)
            module.scaling = EngineScaling(None, CPU)
            engine = results(module, hidden, 7)
            found += [float((a - b).abs().max()) for a, b in zip(own, engine, strict=True)]
    return found


@pytest.mark.parametrize("shards", [False, True])
def test_layers_of_two_ranks_equal_those_of_this_package(shards):
    for found in run_world(differences, 2, shards):
        assert len(found) == 8
        assert max(found) < 1e-12


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_weight_gradients_are_added_to_their_sums(is_split, scale):
    sums = torch.full((24, 16), 7.0, dtype=torch.float64)
    parts = [GradientSlot(part, lambda: None, scale=scale) for part in sums.split([8, 16])]
    whole = GradientSlot(sums, lambda: None, scale=scale)
    expected = torch.zeros_like(sums)
    with installed():
        for seed in range(2):
            weight = draw(24, 16, seed=3).requires_grad_()
            set_slot(weight, StackedSlot(parts, [8, 16]) if is_split else whole)
            hidden = draw(5, 16, seed=seed).requires_grad_()
            output = engine_column_linear(
                hidden, weight, None, single_mesh(0), EngineScaling(None, CPU)
            )
            output.backward(draw(5, 24, seed=seed + 9))
            expected += scale * draw(5, 24, seed=seed + 9).t() @ hidden.detach()
            assert weight.grad is None
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms", "rms with offset"])
def test_norms_equal_those_of_this_package(kind):
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
    own = results(norm, draw(3, 4, 16, seed=2), 5)
    norm.uses_engine = True
    with installed():
        engine = results(norm, draw(3, 4, 16, seed=2), 5)
    for one, other in zip(own, engine, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_an_offset_that_the_library_lacks_stays_with_this_package():
    norm = RMSNorm(16, single_mesh(0), offset=0.5).double()
    norm.uses_engine = True
    # Without the stand-in, a call of the library would fail.
    assert norm(draw(4, 16)).shape == (4, 16)


def test_compiled_layers_call_the_library():
    module = torch.nn.Sequential(
        RMSNorm(16, single_mesh(0)), ColumnParallelLinear(16, 8, single_mesh(0), bias=False)
    ).double()
    with torch.no_grad():
        module[1].weight.copy_(draw(8, 16, seed=1))
    own = results(module, draw(5, 16), 3)
    module[0].uses_engine = True
    module[1].scaling = EngineScaling(None, CPU)
    with installed():
        compiled = results(torch.compile(module, backend="eager"), draw(5, 16), 3)
    assert len(compiled) == len(own) == 4
    for one, other in zip(compiled, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
