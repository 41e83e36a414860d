"""Tests that flash attention with documents, windows and sinks, and FlexAttention with soft caps,
slopes and prefixes, equal the formula on a GPU, also in replayed graphs with changed lengths.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.alibi import AlibiSlopes
from lightning_megatron.layers.attention_core import attend, prepared
from lightning_megatron.layers.attention_operators import attend_by_operators
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.choose_core import choose_core
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu

B, S, H, KV, K = 2, 384, 8, 2, 64
LENGTHS = [[100, 7, 277], [384, 0, 0]]


def spans() -> dict[str, AttentionSpan]:
    lengths = torch.tensor(LENGTHS, device="cuda")
    sinks = torch.linspace(-1, 2, H, device="cuda").requires_grad_()
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


def flex_spans() -> dict[str, AttentionSpan]:
    lengths = torch.tensor(LENGTHS, device="cuda")
    sinks = torch.linspace(-1, 2, H, device="cuda").requires_grad_()
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


def draw_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(S, B, heads, K, device="cuda", dtype=dtype, generator=generator)
        for heads in (H, KV, KV)
    )
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(spans()) if torch.cuda.is_available() else ["documents"])
def test_flash_attention_equals_the_formula(kind: str, dtype: torch.dtype) -> None:
    check_core("flash", spans()[kind], dtype, 0.02)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", list(flex_spans()) if torch.cuda.is_available() else ["prefix"])
def test_flex_attention_equals_the_formula(kind: str, dtype: torch.dtype, bound: float) -> None:
    check_core("flex", flex_spans()[kind], dtype, bound)


def check_core(core: str, span: AttentionSpan, dtype: torch.dtype, bound: float) -> None:
    """Compare outputs and all gradients with the formula in float64."""
    inputs = draw_inputs(dtype)
    assert choose_core(inputs[0].device, dtype, span, S, head_dim=K).core == core
    ready = span.over(prepared(span, B, S, dtype=dtype, device=inputs[0].device))
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    query, key, value = wide
    sinks = () if span.sinks is None else (span.sinks,)
    output = attend(*inputs, ready)
    laid_out = span.laid_out(B, S, inputs[0].device)
    expected_output = attend_by_operators(query, key, value, laid_out).flatten(2)
    outer = torch.randn_like(expected_output)
    actual_tensors = [output, *torch.autograd.grad(output, (*inputs, *sinks), outer.to(dtype))]
    expected_tensors = [
        expected_output,
        *torch.autograd.grad(expected_output, (*wide, *sinks), outer),
    ]
    for number, (actual, expected) in enumerate(zip(actual_tensors, expected_tensors, strict=True)):
        error = relative_difference(actual, expected)
        assert error < bound, f"{number}: off by {error:.2g} of its norm"


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_a_replayed_graph_follows_changed_lengths_of_documents(soft_cap: float | None) -> None:
    query, key, value = (tensor.detach() for tensor in draw_inputs(torch.bfloat16))
    lengths = torch.tensor(LENGTHS, device="cuda")
    span = AttentionSpan(lengths, soft_cap=soft_cap)
    attend(query, key, value, span)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = attend(query, key, value, span)
    for changed in (LENGTHS, [[1, 2, 300], [200, 184, 0]]):
        lengths.copy_(torch.tensor(changed))
        graph.replay()
        assert torch.equal(replayed, attend(query, key, value, span)), changed
