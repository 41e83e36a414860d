"""Attention of new tokens to themselves and to the tokens of a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.key_value_cache import CachedTokens, KeysAndValues
from lightning_megatron.layers.attention.operators import DropWeights, KeyRows, attend_by_operators
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.shapes import Float, Int


def attend_with_cache(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads value_dim"],
    span: AttentionSpan,
    layer: int,
    *,
    dropout: float = 0.0,
    drop: DropWeights = F.dropout,
) -> Float[Tensor, "seq batch heads*value_dim"]:
    """Store the keys and values of new tokens, and compute their attention to all stored tokens.

    Equal to the last positions of ``attend`` for whole rows. An empty cache runs ``attend`` on the
    new tokens; otherwise the span is that of :func:`cached_span`.
    """
    past = span.past
    assert past is not None, "the tokens have a cache"
    stored = past.cache.extend(layer, key[: past.count], value[: past.count], span.window)
    if past.cache.place is not None:
        attended = attend_one_token(query[:1], *stored, past.cache.place, past.padding, span.scale)
        return attended.expand(len(query), -1, -1)
    if past.cache.length == 0:
        return attend(query, key, value, replace(span, past=None), dropout=dropout, drop=drop)
    return _attend_to_stored(query, stored, span, past, dropout)


def cached_span(
    layer_span: AttentionSpan,
    rows: AttentionSpan,
    seq_length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionSpan:
    """Return the span of new tokens, with a mask that all layers of one ``layer_span`` share.

    The rows have a cache that is not empty. If ranks share the rows, the mask is that of the keys
    that this rank holds. ``seq_length`` includes padding after the tokens.
    """
    past = rows.past
    assert past is not None, "the rows have a cache"
    if past.cache.place is not None:
        return AttentionSpan(past=past)
    held = past.cache.held
    if held is None:
        keys = past.cache.places(layer_span.window, past.count, device)[None]
    else:
        keys = held.places_with(past.cache.length, past.count)
        dtype = torch.promote_types(dtype, torch.float32)
    queries = past.query_places(seq_length, device)
    index = keys.clamp(min=0)
    exceeds = layer_span.window is not None and keys.shape[1] > layer_span.window
    mask: Tensor | None = None
    if held is not None or past.visible is not None or seq_length > 1 or exceeds:
        distance = queries[:, None] - keys[:, None]
        visible = (distance >= 0) & (keys >= 0)[:, None]
        if layer_span.window is not None:
            visible = visible & (distance < layer_span.window)
        if past.visible is not None:
            index = index.expand(len(past.visible), -1)
            # Padding attends to itself, because every query must have a key.
            visible = visible & past.visible.gather(1, index)[:, None] | (distance == 0)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(~visible, -torch.inf)[:, None]
    if layer_span.slopes is None:
        return AttentionSpan(mask=mask, past=past)
    # ALiBi counts distances between places in the rows.
    places = queries[None]
    if layer_span.slopes.skips_padding and past.visible is not None:
        counted = past.visible.cumsum(-1)
        places = counted[:, queries]
        index = counted.gather(1, index)
    return AttentionSpan(mask=mask, places=places, past=replace(past, key_places=index))


def _attend_to_stored(
    query: Tensor, stored: KeysAndValues, span: AttentionSpan, past: CachedTokens, dropout: float
) -> Tensor:
    keys, values = stored
    if span.has_own_scores:
        rows = KeyRows(keys.shape[2], places=past.key_places)
        keys = keys.permute(2, 0, 1, 3)
        values = values.permute(2, 0, 1, 3)
        return attend_by_operators(query, keys, values, span, dropout, rows).flatten(2)
    length, num_sequences, heads, _ = query.shape
    kv_heads = keys.shape[1]
    settings: dict[str, Any] = {"attn_mask": span.mask, "dropout_p": dropout, "scale": span.scale}
    if length == 1:
        # The query heads that share a key are rows of one product, so that the key is read once.
        grouped = query.view(num_sequences, kv_heads, heads // kv_heads, -1)
        return F.scaled_dot_product_attention(grouped, keys, values, **settings).flatten(1)[None]
    mixed = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), keys, values, enable_gqa=heads != kv_heads, **settings
    )
    return mixed.permute(2, 0, 1, 3).flatten(2)


def reason_against_token_attention(layer_span: AttentionSpan) -> str | None:
    """Return why a kind of attention does not support places on the device; None if it does."""
    if not layer_span.causal:
        return "its attention is not causal"
    parts = {
        "soft cap": layer_span.soft_cap,
        "slopes": layer_span.slopes,
        "sinks": layer_span.sinks,
    }
    unsupported = next((name for name, value in parts.items() if value is not None), None)
    return None if unsupported is None else f"the scores of its attention have a {unsupported}"


def attend_one_token(
    query: Float[Tensor, "1 batch heads head_dim"],
    keys: Float[Tensor, "batch kv_heads slots head_dim"],
    values: Float[Tensor, "batch kv_heads slots value_dim"],
    place: Int[Tensor, "1"],
    padding: Int[Tensor, " batch"] | None,
    scale: float | None,
) -> Float[Tensor, "1 batch heads*value_dim"]:
    """Return the attention of one token of each row to the tokens up to it.

    Equal to ``attend`` of the whole rows at the place of the token. The host reads no value from
    the device, so a CUDA graph can capture the call. Slot ``p % slots`` of the keys holds the token
    at place ``p``.

    Args:
        padding: Padding before each row; None means none (tokens).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernels = fused_kernels(query)
    attend = attend_by_mask if kernels is None else kernels.attend_one_token
    attended: Tensor = attend(query, keys, values, place, padding, scale)
    return attended


def attend_by_mask(
    query: Float[Tensor, "1 batch heads head_dim"],
    keys: Float[Tensor, "batch kv_heads slots head_dim"],
    values: Float[Tensor, "batch kv_heads slots value_dim"],
    place: Int[Tensor, "1"],
    padding: Int[Tensor, " batch"] | None,
    scale: float,
) -> Float[Tensor, "1 batch heads*value_dim"]:
    """Return the attention of one token by torch's operator and a mask over all slots."""
    slots = keys.shape[2]
    index = torch.arange(slots, device=query.device)
    # Slot s holds the latest token whose place is s modulo ``slots``; it is empty if that place is
    # below 0.
    places = place - (place - index).remainder(slots)
    first = torch.zeros_like(place) if padding is None else padding
    mask = (places >= first[:, None])[:, None, None]
    # The query heads that share a key are rows of one product, so that the key is read once.
    grouped = query.view(query.shape[1], keys.shape[1], -1, query.shape[-1])
    # Slots without a token may hold any value, even NaN, which a mask of scores does not remove.
    keys = keys.masked_fill(~mask.transpose(-1, -2), 0.0)
    values = values.masked_fill(~mask.transpose(-1, -2), 0.0)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return attended.flatten(1)[None]
