"""Tests of the blocks of context-parallel attention on a GPU, whose kernels return log-sum-exps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.document_cut import DocumentCut
from lightning_megatron.layers.attention.parts import backward_part, core_of_part, forward_part
from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan
from lightning_megatron.layers.context_parallel.blocks import (
    Block,
    add_at,
    gathered_blocks,
    ring_blocks,
    taken,
)
from lightning_megatron.layers.context_parallel.ring import PartialSum
from lightning_megatron.layers.context_parallel.sequence_order import in_rank_order
from lightning_megatron.plan.context import ContextCut
from tests.oracles import relative_difference

pytestmark = pytest.mark.gpu

S, B, D, CP = 512, 2, 64, 4
DOCUMENTS = AttentionSpan.packed([[301, 3, 1, 0, 77], [130, 129]], S)
SPANS = {
    "whole rows": AttentionSpan(),
    "a window that ends inside a piece": AttentionSpan(window=100),
    "a window over several pieces": AttentionSpan(window=200),
    "odd documents, some shorter than the ranks": DOCUMENTS,
    "documents and a window": AttentionSpan(window=100).over(DOCUMENTS),
    "to both sides": AttentionSpan(causal=False),
    "a cap and a window": AttentionSpan(soft_cap=0.7, window=100),
    "slopes": AttentionSpan(slopes=AlibiSlopes(8, 4.0)),
    "slopes and documents": AttentionSpan(slopes=AlibiSlopes(8, 4.0)).over(DOCUMENTS),
    "a cap, slopes, documents and a window": AttentionSpan(
        soft_cap=0.7, slopes=AlibiSlopes(8, 4.0), window=100
    ).over(DOCUMENTS),
}


def cut_over(span: AttentionSpan, rank: int) -> AttentionSpan:
    """Return the span with the cut of its documents for a rank."""
    if span.borders is None:
        return span
    cut = DocumentCut.of(span.borders, B, S, CP, rank, longest=span.longest)
    return replace(span, cut=cut)


def visits(
    span: AttentionSpan, rank: int, parts: list[Tensor], is_gathered: bool
) -> list[tuple[Tensor, list[Block]]]:
    """Return the positions of the keys that a rank visits, with the blocks of these keys."""
    if is_gathered:
        everywhere = torch.arange(S, device="cuda")[:, None].expand(S, B)
        return [(everywhere, gathered_blocks(span, S // CP, CP, rank, everywhere.device))]
    return list(zip(parts, ring_blocks(span, S // CP, CP, rank, parts[0].device), strict=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("name", list(SPANS))
@pytest.mark.parametrize("is_gathered", [False, True])
def test_attention_by_blocks_in_half_precision_equals_float64(kv_heads, name, is_gathered):
    """Compute the four ranks of a ring one after the other in this process."""
    span = SPANS[name].laid_out(B, S, torch.device("cuda"))
    # Some packages of flash attention have soft caps.
    cores = ("flex",) if span.slopes is not None else ("flash", "flex")
    if span.borders is not None and span.window is not None and not is_gathered:
        pytest.skip("documents with a window are gathered")
    torch.manual_seed(0)
    shapes = [(S, B, heads, D) for heads in (8, kv_heads, kv_heads)]
    full = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    exact = [tensor.double().requires_grad_() for tensor in full]
    query, key, value = exact
    expected = attend(query, key, value, span)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    spans = [cut_over(span, rank) for rank in range(CP)]
    index = torch.arange(S, device="cuda")[:, None].expand(S, B).contiguous()
    parts = list(in_rank_order(index, spans[0].cut or ContextCut(CP, S)).chunk(CP))
    sums = [torch.zeros(shape, device="cuda") for shape in shapes]
    for rank, positions in enumerate(parts):
        query = taken(full[0], positions.t())
        visited = visits(spans[rank], rank, parts, is_gathered)
        total = PartialSum(query)
        for at, blocks in visited:
            keys, values = (taken(tensor, at.t()) for tensor in full[1:])
            for block in blocks:
                queries = taken(query, block.queries)
                key_rows, value_rows = taken(keys, block.keys), taken(values, block.keys)
                core = core_of_part(queries, block.span, block.key_rows)
                assert core in cores, "no scores are stored"
                out, lse = forward_part(queries, key_rows, value_rows, block.span, block.key_rows)
                total.add(block.queries, out, lse)
        out, lse = total.out.bfloat16(), total.log_sum
        expected_rows = taken(expected, positions.t())
        torch.testing.assert_close(out.flatten(2).double(), expected_rows, rtol=0, atol=0.02)
        rank_grad = taken(grad, positions.t()).bfloat16().unflatten(-1, (8, D))
        query_grad = torch.zeros(query.shape, device="cuda")
        for at, blocks in visited:
            keys, values = (taken(tensor, at.t()) for tensor in full[1:])
            shares = [torch.zeros(keys.shape, device="cuda") for _ in range(2)]
            for block in blocks:
                rows = block.queries
                gradients = backward_part(
                    taken(rank_grad, rows),
                    (taken(query, rows), taken(keys, block.keys), taken(values, block.keys)),
                    (taken(out, rows), taken(lse.permute(2, 0, 1), rows).permute(1, 2, 0)),
                    block.span,
                    block.key_rows,
                )
                add_at(query_grad, block.queries, gradients[0])
                add_at(shares[0], block.keys, gradients[1])
                add_at(shares[1], block.keys, gradients[2])
            add_at(sums[1], at.t(), shares[0])
            add_at(sums[2], at.t(), shares[1])
        add_at(sums[0], positions.t(), query_grad)
    for actual, expected_leaf in zip(sums, exact, strict=True):
        assert expected_leaf.grad is not None
        assert relative_difference(actual, expected_leaf.grad) < 0.01
