"""Tests that flash attention with documents, windows and sinks, and FlexAttention with soft caps,
slopes and prefixes, equal the formula on a GPU, also with values that are smaller than keys, and in
replayed graphs with changed lengths.
"""

from __future__ import annotations

from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.attention.choose_core import choose_core
from lightning_megatron.layers.attention.core import attend, prepared
from lightning_megatron.layers.attention.operators import attend_by_operators
from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan
from tests.gpu.grouped import captured
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu

B, S, H, KV, K = 2, 384, 8, 2, 64
LENGTHS = [[100, 7, 277], [384, 0, 0]]


def spans(core: str) -> dict[str, AttentionSpan]:
    """Return the spans whose attention a core computes."""
    lengths = torch.tensor(LENGTHS, device="cuda")
    sinks = torch.linspace(-1, 2, H, device="cuda").requires_grad_()
    if core == "flash":
        return {
            "documents": AttentionSpan(lengths, longest=384),
            "documents both ways": AttentionSpan(lengths, causal=False),
            "padded": AttentionSpan.padded(lengths[:, 2].clamp(min=100), S),
            "padding alone": AttentionSpan.padded(lengths[:, 2], S),
            "window": AttentionSpan(window=33),
            "documents, window": AttentionSpan(lengths, window=33),
            "sinks": AttentionSpan(sinks=sinks),
            "documents, window, sinks": AttentionSpan(lengths, window=33, sinks=sinks, scale=0.2),
        }
    return {
        "soft cap": AttentionSpan(soft_cap=0.7),
        "soft cap both ways": AttentionSpan(soft_cap=0.7, causal=False),
        "soft cap, window": AttentionSpan(soft_cap=0.7, window=33),
        "soft cap, documents": AttentionSpan(lengths, soft_cap=0.7, scale=0.2),
        "soft cap, documents, sinks": AttentionSpan(lengths, soft_cap=0.7, sinks=sinks),
        "slopes": AttentionSpan(slopes=AlibiSlopes(H)),
        "slopes, documents": AttentionSpan(lengths, slopes=AlibiSlopes(H, 4.0)),
        "slopes, window": AttentionSpan(window=33, slopes=AlibiSlopes(H, 4.0), scale=0.2),
        "prefix": AttentionSpan(prefix=torch.tensor([200, 0], device="cuda")),
    }


Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]


def wide_of(inputs: Inputs) -> Inputs:
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in inputs)
    return query, key, value


def draw_inputs(dtype: torch.dtype) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(
            S, B, heads, K, device="cuda", dtype=dtype, generator=generator
        ).requires_grad_()
        for heads in (H, KV, KV)
    )
    return query, key, value


@pytest.mark.parametrize(
    ("core", "dtype", "bound"),
    [
        ("flash", torch.bfloat16, 0.02),
        ("flash", torch.float16, 0.02),
        ("flex", torch.bfloat16, 0.02),
        ("flex", torch.float32, 1e-5),
    ],
)
def test_outputs_and_gradients_equal_the_formula(core, dtype, bound):
    for kind, span in spans(core).items():
        inputs = draw_inputs(dtype)
        device = inputs[0].device
        assert choose_core(device, dtype, span, S, head_dim=K).core == core, kind
        ready = span.over(prepared(span, B, S, dtype=dtype, device=device))
        wide = wide_of(inputs)
        sinks = () if span.sinks is None else (span.sinks,)
        output = attend(*inputs, ready)
        expected_output = attend_by_operators(*wide, span.laid_out(B, S, device)).flatten(2)
        outer = torch.randn_like(expected_output)
        gradients = torch.autograd.grad(output, (*inputs, *sinks), outer.to(dtype))
        expected_gradients = torch.autograd.grad(expected_output, (*wide, *sinks), outer)
        for number, (actual, expected) in enumerate(
            zip((output, *gradients), (expected_output, *expected_gradients), strict=True)
        ):
            error = relative_difference(actual, expected)
            assert error < bound, f"{kind}, {number}: off by {error:.2g} of its norm"


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (96, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_with_values_smaller_than_keys_equals_the_formula(
    head_dim, value_dim, dtype, has_documents
):
    lengths = torch.tensor(LENGTHS, device="cuda") if has_documents else None
    span = AttentionSpan(lengths, scale=0.1).laid_out(B, S, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value, outer = (
        torch.randn(S, B, H, size, device="cuda", dtype=dtype, generator=generator)
        for size in (head_dim, head_dim, value_dim, value_dim)
    )
    inputs = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    wide = wide_of(inputs)
    output = attend(query, key, value, span)
    gradients = torch.autograd.grad(output, inputs, outer.flatten(2))
    expected_output = attend_by_operators(*wide, span).flatten(2)
    expected_gradients = torch.autograd.grad(expected_output, wide, outer.double().flatten(2))
    tolerance = 0.02 if dtype == torch.bfloat16 else 2e-3
    for actual, expected in zip(
        (output, *gradients), (expected_output, *expected_gradients), strict=True
    ):
        error = (actual.detach().double() - expected.detach()).abs().max()
        assert error <= tolerance * expected.detach().abs().max()


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_a_replayed_graph_follows_changed_lengths_of_documents(soft_cap):
    query, key, value = (tensor.detach() for tensor in draw_inputs(torch.bfloat16))
    lengths = torch.tensor(LENGTHS, device="cuda")
    span = AttentionSpan(lengths, soft_cap=soft_cap)
    graph, replayed = captured(lambda: attend(query, key, value, span))
    for changed in (LENGTHS, [[1, 2, 300], [200, 184, 0]]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        assert torch.equal(replayed, attend(query, key, value, span)), changed
