"""Attention to a cache whose tokens are distributed over the ranks that share the rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.layers.attention.dense_mask import KeyRows
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.attention.key_value_cache import HeldTokens
from lightning_megatron.layers.attention.parts import forward_by_operators
from lightning_megatron.layers.attention.span import AttentionSpan, add_sinks
from lightning_megatron.plan.context import ContextCut
from lightning_megatron.shapes import Float, Int


def store_first(
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads value_dim"],
    span: AttentionSpan,
    layer: int,
    axis: MeshAxis,
) -> None:
    """Store the keys and values of this rank's part of the first tokens of rows.

    The span has ``past``, whose cache is empty.
    """
    past = span.past
    assert past is not None, "the tokens have a cache"
    cache = past.cache
    if cache.held is None:
        places = _held_places(span.order, key.shape[0], axis, key.device)
        cache.held = HeldTokens(places, past.count, axis.size, axis.rank, cache.max_length)
    cache.held.cache.extend(layer, key, value, None)


def attend_to_held(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads value_dim"],
    span: AttentionSpan,
    layer: int,
    axis: MeshAxis,
) -> Float[Tensor, "seq batch heads*value_dim"]:
    """Store each new token on one rank, and compute attention of the new tokens to all tokens.

    All ranks have all new tokens, and the span of ``attention.cached_attention.cached_span``. Each
    rank computes attention to the tokens that it holds, and the results are merged exactly, as in
    :class:`~lightning_megatron.layers.context_parallel.ring.PartialSum`. No gradients flow to the
    keys of other ranks.

    Communication: an all-gather of the results of one part for each query.
    """
    past = span.past
    assert past is not None, "the tokens have a cache"
    held = past.cache.held
    assert held is not None, "the first tokens were stored on the ranks that share their rows"
    local = held.local_indices(past.cache.length, past.count)
    keys, values = held.cache.extend(layer, key[local], value[local], None)
    rows = KeyRows(keys.shape[2], places=past.key_places)
    keys = keys.permute(2, 0, 1, 3)
    values = values.permute(2, 0, 1, 3)
    out, log_sum = forward_by_operators(query, keys, values, replace(span, past=None), rows)
    part = torch.cat((out.to(log_sum.dtype), log_sum.permute(2, 0, 1)[..., None]), -1)
    outs, log_sums = all_gather_sequence(part[None], axis).split((out.shape[-1], 1), -1)
    total = log_sums.logsumexp(0)
    mixed = ((log_sums - total).exp() * outs).sum(0)
    if span.sinks is not None:
        mixed, _ = add_sinks(mixed, total[..., 0].permute(1, 2, 0), span.sinks)
    return mixed.to(query.dtype).flatten(2)


def _held_places(
    order: TokenOrder | None, seq_part: int, axis: MeshAxis, device: torch.device
) -> Int[Tensor, "#batch seq_part"]:
    if order is not None:
        return order.order[:, axis.rank]
    cut = ContextCut(axis.size, axis.size * seq_part)
    return torch.tensor(cut.positions(axis.rank), device=device)[None]
