"""The blocks of context-parallel attention on a GPU, whose kernels return the logarithms."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.context_parallel.partial_attention import (
    PartialSum,
    add_blocks,
    add_gradients,
)
from lightning_megatron.plan.context import ContextCut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

S, B, D, CP = 512, 2, 64, 4


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_blocks_in_half_precision_add_up(
    kv_heads: int, window: int | None, is_gathered: bool
) -> None:
    """The ring of four ranks, one rank after the other in this process, against float64."""
    torch.manual_seed(0)
    shapes = [(S, B, heads, D) for heads in (8, kv_heads, kv_heads)]
    full = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    exact = [one.double().requires_grad_() for one in full]
    expected = attend(*exact, AttentionSpan(window=window))
    grad = torch.randn_like(expected)
    expected.backward(grad)

    cut = ContextCut(CP, S)
    rows = [torch.tensor(cut.positions(rank), device="cuda") for rank in range(CP)]
    sums = [torch.zeros(shape, device="cuda") for shape in shapes]
    for rank, own in enumerate(rows):
        query = full[0][own]
        if is_gathered:
            index = torch.arange(S, device="cuda")
            visits = [(index, cut.gathered_blocks(rank, True, window))]
        else:
            visits = [
                (rows[source], cut.ring_blocks(rank, source, True, window)) for source in range(CP)
            ]
        total = PartialSum(query)
        for at, blocks in visits:
            add_blocks(total, query, full[1][at], full[2][at], blocks, D**-0.5)
        out = total.out.bfloat16()
        found = out.permute(2, 0, 1, 3).flatten(2).double()
        torch.testing.assert_close(found, expected[own], rtol=0, atol=0.02)
        own_grad = grad[own].bfloat16().unflatten(-1, (8, D)).permute(1, 2, 0, 3)
        of_query = torch.zeros(query.shape, device="cuda")
        for at, blocks in visits:
            keys, values = full[1][at], full[2][at]
            shares = [torch.zeros(keys.shape, device="cuda") for _ in range(2)]
            both = of_query, shares[0], shares[1]
            parts = query, keys, values, out, total.log_sum
            add_gradients(both, own_grad, *parts, blocks, D**-0.5)
            sums[1].index_add_(0, at, shares[0])
            sums[2].index_add_(0, at, shares[1])
        sums[0][own] = of_query
    for found, whole in zip(sums, exact, strict=True):
        assert whole.grad is not None
        error = (found - whole.grad).norm() / whole.grad.norm()
        assert float(error) < 0.01
