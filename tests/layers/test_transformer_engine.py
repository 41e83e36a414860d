"""Layers that use Transformer Engine equal those of this package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from lightning_megatron.errors import SpeedWarning
from lightning_megatron.experts.compute.grouped_linear import grouped_linear
from lightning_megatron.layers.attention.engine_core import _ATTENTION, attend_by_engine
from lightning_megatron.layers.attention.operators import attend_by_operators
from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan, CoreResults
from lightning_megatron.layers.linear.engine_products import engine_column_linear
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, StackedSlot, set_slot
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.layered import single_mesh
from tests.layers.fake_engine import installed, output_and_gradients
from tests.layers.noted_casts import spread
from tests.refusals import check_refusals

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


LENGTHS = torch.tensor([[3, 4, 5], [9, 0, 0]])
SPANS: dict[str, AttentionSpan] = {
    "causal": AttentionSpan(),
    "both ways": AttentionSpan(causal=False, scale=0.3),
    "window": AttentionSpan(window=4),
    "window both ways": AttentionSpan(window=4, causal=False),
    "window of whole rows": AttentionSpan(window=12),
    "documents": AttentionSpan(LENGTHS, longest=9),
    "documents both ways": AttentionSpan(LENGTHS, causal=False),
    "documents, window": AttentionSpan(LENGTHS, window=3),
}


@pytest.mark.parametrize("kind", SPANS)
def test_engine_attention_equals_the_formula(kind):
    query, key, value = (
        spread(12, 2 * heads * 8, seed=heads).view(12, 2, heads, 8).requires_grad_()
        for heads in (4, 2, 2)
    )
    span = SPANS[kind]
    with installed():
        actual = attend_by_engine(query, key, value, span)
    expected = attend_by_operators(query, key, value, span.laid_out(2, 12, query.device))
    torch.testing.assert_close(actual, expected.flatten(2), rtol=1e-10, atol=1e-10)


def test_engine_attention_refuses_what_the_library_does_not_compute():
    query = spread(4, 8).view(4, 1, 1, 8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, "cannot have a mask for each pair"),
        ({"prefix": torch.tensor([2])}, "cannot have a prefix"),
        ({"slopes": AlibiSlopes(1)}, "cannot have ALiBi slopes"),
        ({"sinks": torch.zeros(1)}, "cannot have sinks"),
        ({"results": CoreResults()}, "cannot have recompute='full_except_core'"),
    ]
    check_refusals(
        lambda **options: attend_by_engine(query, query, query, AttentionSpan(**options)), cases
    )


def test_engine_attention_without_a_kernel_warns():
    query = spread(4, 8).view(4, 1, 1, 8)
    with installed():
        chosen = import_module(_ATTENTION)._attention_backends
        chosen["use_fused_attention"] = False
        with pytest.warns(SpeedWarning, match="no kernel for this attention"):
            attend_by_engine(query, query, query, AttentionSpan())


@pytest.mark.parametrize("gap", [0, 3])
def test_engine_experts_equal_a_loop_and_add_to_slots(gap):
    sizes = [2, 0, 4, 1]
    ends = torch.tensor(sizes).cumsum(0).int()
    results = []
    for backend in ("te", "loop"):
        weights = [spread(6, 8, seed=seed).requires_grad_() for seed in range(4)]
        memory = torch.full((4, 48 + gap), 7.0)
        sums = [row[:48].view(6, 8) for row in memory]
        for weight, gradient_sum in zip(weights, sums, strict=True):
            set_slot(weight, GradientSlot(gradient_sum, lambda: None))
        rows = spread(9, 8, seed=5).requires_grad_()
        with installed():
            for seed in (1, 2):
                output = grouped_linear(rows, weights, ends, backend)
                output[:7].backward(spread(7, 6, seed=seed))
            plain = [weight.detach().clone().requires_grad_() for weight in weights]
            grouped_linear(rows, plain, ends, backend)[:7].sum().backward()
        assert rows.grad is not None
        grads = [weight.grad for weight in plain]
        results.append([output[:7].detach(), rows.grad[:7], *sums, *grads])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


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
