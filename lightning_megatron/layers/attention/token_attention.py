"""Attention of one new token of each row at a place that only the device knows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.shapes import Float, Int


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
