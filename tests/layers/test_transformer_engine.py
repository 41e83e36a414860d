"""Layers that use Transformer Engine equal those of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.layers.linear.engine_products import engine_column_linear
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, StackedSlot, set_slot
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.layered import single_mesh
from tests.layers.fake_engine import installed, output_and_gradients
from tests.layers.noted_casts import spread

MESH = single_mesh(0)


def test_engine_layers_add_weight_gradients_to_slots():
    for is_split, scale in ((False, 1.0), (True, 0.5)):
        sums = torch.full((24, 16), 7.0, dtype=torch.float64)
        parts = [GradientSlot(part, lambda: None, scale=scale) for part in sums.split([8, 16])]
        full_slot = GradientSlot(sums, lambda: None, scale=scale)
        expected = torch.zeros_like(sums)
        for seed in range(2):
            weight, grad = spread(24, 16, seed=3).requires_grad_(), spread(5, 24, seed=seed + 9)
            set_slot(weight, StackedSlot(parts, [8, 16]) if is_split else full_slot)
            hidden = spread(5, 16, seed=seed).requires_grad_()
            with installed():
                scaling = EngineScaling(None, torch.device("cpu"))
                engine_column_linear(hidden, weight, None, MESH, scaling).backward(grad)
            expected += scale * grad.t() @ hidden.detach()
            assert weight.grad is None
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)


NORMS: dict[str, Any] = {
    "layer": lambda: LayerNorm(16, MESH),
    "layer without bias": lambda: LayerNorm(16, MESH, bias=False),
    "rms": lambda: RMSNorm(16, MESH),
    "rms with offset": lambda: RMSNorm(16, MESH, offset=1.0),
}


@pytest.mark.parametrize("kind", NORMS)
def test_engine_norms_equal_those_of_this_package(kind):
    norm = NORMS[kind]().double()
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(spread(1, 16, seed=seed)[0])
    expected_results = output_and_gradients(norm, spread(3, 4, 16, seed=2), 5)
    norm.uses_engine = True
    with installed():
        actual_results = output_and_gradients(norm, spread(3, 4, 16, seed=2), 5)
    for expected, actual in zip(expected_results, actual_results, strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-10, atol=1e-10)


def test_norms_with_an_unsupported_offset_do_not_call_the_library():
    norm = RMSNorm(16, MESH, offset=0.5).double()
    norm.uses_engine = True
    # Without the stand-in, a call of the library would fail.
    assert norm(spread(4, 16)).shape == (4, 16)
