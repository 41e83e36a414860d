"""The attention core in operators of torch, for cases that no kernel supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.attention.dense_mask import KeyRows, biases_of, seen_pairs
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.shapes import Float

#: Function that drops attention weights with a probability.
DropWeights: TypeAlias = Callable[[Tensor, float], Tensor]


def attend_by_operators(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    value: Float[Tensor, "_ batch kv_heads value_dim"],
    span: AttentionSpan,
    dropout: float = 0.0,
    keys: KeyRows | None = None,
    *,
    drop: DropWeights = F.dropout,
) -> Float[Tensor, "seq batch heads value_dim"]:
    """Compute attention, with the scores of all pairs of tokens in memory."""
    scores = masked_scores(query, key, span, keys)
    if span.sinks is not None:
        sinks = span.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    # Softmax in float32 at least, as kernels compute it.
    weights = scores.softmax(-1)[..., : key.shape[0]].to(value.dtype)
    weights = drop(weights, dropout)
    return torch.einsum("bhst,tbhd->sbhd", weights, repeated(value, query))


def masked_scores(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> Float[Tensor, "batch heads seq _"]:
    """Return scores with scale, soft cap, biases and mask, in float32 or wider."""
    length, num_sequences = query.shape[:2]
    scores = raw_scores(query, key, span)
    if span.soft_cap is not None:
        scores = span.soft_cap * (scores / span.soft_cap).tanh()
    if span.slopes is not None:
        scores = scores - biases_of(span, span.slopes, length, query.device, scores.dtype, keys)
    if span.mask is not None and span.mask.dtype != torch.bool:
        return scores + span.mask
    visible = seen_pairs(span, num_sequences, length, query.device, keys)
    return scores.masked_fill(~visible, -torch.inf)


def raw_scores(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    span: AttentionSpan,
) -> Float[Tensor, "batch heads seq _"]:
    """Return scaled scores without soft cap, biases and mask, in float32 or wider."""
    products = torch.einsum("sbhd,tbhd->bhst", query, repeated(key, query))
    wide = torch.promote_types(products.dtype, torch.float32)
    return products.to(wide) * scale_of(span, query)


def repeated(
    shared: Float[Tensor, "_ batch kv_heads value_dim"],
    query: Float[Tensor, "seq batch heads head_dim"],
) -> Float[Tensor, "_ batch heads value_dim"]:
    """Return key or value heads, repeated for every query head."""
    repeats = query.shape[2] // shared.shape[2]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=2)


def scale_of(span: AttentionSpan, query: Float[Tensor, "... head_dim"]) -> float:
    """Return the factor of the scores: that of the span, or ``head_dim ** -0.5``."""
    return float(query.shape[-1] ** -0.5) if span.scale is None else span.scale
