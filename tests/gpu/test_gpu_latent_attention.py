"""Tests that attention whose values are smaller than its keys equals the formula on a GPU, with and
without documents.
"""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_operators import attend_by_operators
from lightning_megatron.layers.attention_span import AttentionSpan

pytestmark = pytest.mark.gpu

S, B, H = 384, 2, 8


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (96, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_with_values_smaller_than_keys_equals_the_formula(
    head_dim: int, value_dim: int, dtype: torch.dtype, has_documents: bool
) -> None:
    lengths = torch.tensor([[100, 7, 277], [384, 0, 0]], device="cuda") if has_documents else None
    span = AttentionSpan(lengths, scale=0.1).laid_out(B, S, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (head_dim, head_dim, value_dim, value_dim)
    *inputs, weights = (
        torch.randn(S, B, H, size, device="cuda", dtype=dtype, generator=generator)
        for size in sizes
    )
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    output = attend(query, key, value, span)
    gradients = torch.autograd.grad(output, (query, key, value), weights.flatten(2))
    wide_query, wide_key, wide_value = (
        tensor.detach().double().requires_grad_() for tensor in inputs
    )
    expected_output = attend_by_operators(wide_query, wide_key, wide_value, span).flatten(2)
    expected_gradients = torch.autograd.grad(
        expected_output, (wide_query, wide_key, wide_value), weights.double().flatten(2)
    )
    tolerance = 0.02 if dtype == torch.bfloat16 else 2e-3
    for actual, expected in zip(
        (output, *gradients), (expected_output, *expected_gradients), strict=True
    ):
        scale = float(expected.detach().abs().max())
        error = float((actual.detach().double() - expected.detach()).abs().max())
        assert error <= tolerance * scale
