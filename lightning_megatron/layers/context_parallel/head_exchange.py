"""Attention that divides heads instead of positions among ranks, by all-to-alls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_to_all_rows
from lightning_megatron.layers.attention.document_cut import DocumentCut
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.sequence_order import (
    in_rank_order,
    in_sequence_order,
)
from lightning_megatron.plan.context import ContextCut, kv_heads_of, split_heads_over
from lightning_megatron.shapes import Float

#: Attention of some heads over the positions that a rank holds after the all-to-all.
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchanged_attention(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    axis: MeshAxis,
    core: Core,
    documents: DocumentCut | None = None,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention with the heads divided among the ranks and all positions on each of them.

    An all-to-all gives each rank all positions of its share of the heads, and a second one returns
    the results. All ranks have the same number of heads if the number of ranks divides the heads;
    otherwise some ranks have one head more, and some may have none. Each rank receives the
    key/value heads that its query heads need, so several ranks may receive the same ones.

    Equal to ``core`` of the whole sequence, bit for bit if it computes heads independently.

    Args:
        core: Attention of some heads, called with ``(seq, batch, heads, head_dim)`` in the order
            of the sequence; its result is ``(seq, batch, heads * head_dim)``.
        documents: Cut of packed documents over the ranks; None means that rows are cut.

    Communication: two all-to-alls forward, two backward.
    Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
    """
    cut = documents or ContextCut(axis.size, axis.size * query.shape[0])
    heads = query.shape[2]
    kv_heads = key.shape[2]
    shares = split_heads_over(heads, axis.size)
    needed = [list(kv_heads_of(share, heads, kv_heads)) for share in shares]
    num_heads = len(shares[axis.rank])
    own_kv = len(needed[axis.rank])
    all_heads = [*query.unbind(2), *key.unbind(2), *value.unbind(2)]
    # One message carries the heads of queries, keys and values, sorted by destination.
    order: list[int] = []
    for share, kv in zip(shares, needed, strict=True):
        order += share
        order += [heads + head for head in kv]
        order += [heads + kv_heads + head for head in kv]
    rows = torch.stack([all_heads[head] for head in order])
    sends = [len(share) + 2 * len(kv) for share, kv in zip(shares, needed, strict=True)]
    received = all_to_all_rows(rows, sends, [num_heads + 2 * own_kv] * axis.size, axis)
    parts = (
        received.unflatten(0, (axis.size, num_heads + 2 * own_kv))
        .permute(0, 2, 3, 1, 4)
        .flatten(0, 1)
    )
    own_heads = in_sequence_order(parts, cut).split([num_heads, own_kv, own_kv], dim=2)
    # A rank without heads computes no attention, but its backward pass must communicate, too.
    mixed = (
        core(*own_heads).unflatten(-1, (num_heads, query.shape[3])) if num_heads else sum(own_heads)
    )
    parts = in_rank_order(mixed, cut).unflatten(0, (axis.size, query.shape[0]))
    rows = parts.permute(0, 3, 1, 2, 4).flatten(0, 1)
    back = all_to_all_rows(rows, [num_heads] * axis.size, [len(share) for share in shares], axis)
    return back.permute(1, 2, 0, 3).flatten(2)


def of_own_heads(span: AttentionSpan, heads: int, axis: MeshAxis) -> AttentionSpan:
    """Return the span for the heads that this rank computes during attention.

    Args:
        span: Span of all heads.
        heads: Query heads that are divided (heads).
        axis: Ranks that divide the heads.
    """
    share = split_heads_over(heads, axis.size)[axis.rank]
    if span.sinks is not None:
        span = replace(span, sinks=span.sinks[share.start : share.stop])
    if span.slopes is not None:
        span = replace(span, slopes=span.slopes.of(share))
    return span
