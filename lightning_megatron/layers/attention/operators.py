"""The attention core in operators of torch, and dense masks.

Both are for cases that no kernel supports without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.attention.span import AlibiSlopes, AttentionSpan, document_of_tokens
from lightning_megatron.shapes import Bool, Float, Int

#: Function that drops attention weights with a probability.
DropWeights: TypeAlias = Callable[[Tensor, float], Tensor]
#: Queries, keys and values of a part, or their gradients.
PartInputs = tuple[
    Float[Tensor, "seq batch heads head_dim"],
    Float[Tensor, "_ batch kv_heads head_dim"],
    Float[Tensor, "_ batch kv_heads head_dim"],
]
#: Divisor of the row stride of a mask (elements).
_ALIGNMENT = 8


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


@dataclass(frozen=True, eq=False)
class KeyRows:
    """Rows of keys and values that differ from those of the queries; None stands for the same rows.

    Args:
        borders: Cumulative lengths of the documents of the keys, as many as the queries have; None
            means one document per row (tokens).
        longest: Upper bound of the lengths; None means the length of the rows (tokens).
        behind: Number of tokens by which a document's last query follows its last key (tokens).
        places: Place of every key in its row, like ``AttentionSpan.places`` of the queries; None
            counts along the row (tokens).
    """

    seq_length: int
    borders: Int[Tensor, " borders"] | None = None
    longest: int | None = None
    behind: int = 0
    places: Int[Tensor, "#batch _"] | None = None


def keys_of(span: AttentionSpan, seq_length: int) -> KeyRows | None:
    """Return the rows of the keys of whole rows; None if they have the documents of the queries."""
    if span.key_borders is None:
        return None
    return KeyRows(seq_length, span.key_borders, span.longest, places=span.places)


def is_plain(span: AttentionSpan, seq_length: int) -> bool:
    """Return whether a span is attention over whole rows, causal or to all keys, without a mask."""
    has_window = span.window is not None and span.window < seq_length
    return not (has_window or span.has_documents or span.prefix is not None) and span.mask is None


def seen_pairs(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    keys: KeyRows | None = None,
) -> Bool[Tensor, "#batch 1 #seq _"]:
    """Return for each pair of a query and a key whether the query attends to the key.

    The span is laid out, and has no mask of numbers.
    """
    keys = keys or keys_of(span, seq_length) or KeyRows(seq_length, span.borders)
    is_of_keys = span.mask is not None and span.mask.shape[2] == 1
    # All queries of a row see the same keys, so places are not needed.
    if span.mask is not None and is_of_keys and not span.causal and span.window is None:
        return _with_self_attention(span.mask)
    # Places count from the end of a document, as in flash attention.
    query, query_left = places_from_end(span.borders, num_sequences, seq_length, device)
    key, key_left = places_from_end(keys.borders, num_sequences, keys.seq_length, device)
    distance = key_left[:, None, :] - query_left[:, :, None] + keys.behind
    visible = query[:, :, None] == key[:, None, :]
    if span.causal:
        visible = visible & (distance >= 0)
    if span.window is not None:
        visible = visible & (distance.abs() < span.window)
    if span.prefix is not None:
        index = torch.arange(keys.seq_length, device=device)
        visible = visible | (index < span.prefix[:, None])[:, None]
    visible = visible[:, None]
    return visible if span.mask is None else _with_self_attention(visible & span.mask)


def places_of_visible(span: AttentionSpan) -> Int[Tensor, "#batch _"] | None:
    """Return the place of each token in its row; None means that places count along the row.

    Only visible tokens count if the slopes skip padding.
    """
    slopes = span.slopes
    if slopes is None or not slopes.skips_padding or span.mask is None:
        return span.places
    if span.mask.shape[2] != 1 or span.mask.dtype != torch.bool:
        return span.places
    return span.mask[:, 0, 0].cumsum(-1)


def biases_of(
    span: AttentionSpan,
    slopes: AlibiSlopes,
    seq_length: int,
    device: torch.device,
    dtype: torch.dtype,
    keys: KeyRows | None = None,
) -> Float[Tensor, "#batch heads seq _"]:
    """Return the ALiBi biases that are subtracted from the scores of all pairs."""
    queries = places_of_visible(span)
    key_places = queries if keys is None else keys.places
    if queries is None:
        queries = torch.arange(seq_length, device=device)[None]
    if key_places is None:
        key_places = queries if keys is None else torch.arange(keys.seq_length, device=device)[None]
    distances = (queries[:, :, None] - key_places[:, None, :]).abs()
    return slopes.on(device).to(dtype)[:, None, None] * distances[:, None].to(dtype)


def places_from_end(
    borders: Int[Tensor, " borders"] | None,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
) -> tuple[Int[Tensor, "#batch seq"], Int[Tensor, "#batch seq"]]:
    """Return each token's document, and the number of tokens from it to its document's end.

    Without borders every row is a document.
    """
    if borders is None:
        left = torch.arange(seq_length, 0, -1, device=device)[None]
        return torch.zeros_like(left), left
    document = document_of_tokens(borders, num_sequences, seq_length)
    index = torch.arange(num_sequences * seq_length, device=device).view(num_sequences, seq_length)
    return document, borders[document + 1] - index


def _with_self_attention(
    mask: Bool[Tensor, "#batch 1 #seq seq"],
) -> Bool[Tensor, "#batch 1 #seq seq"]:
    """Make queries without keys attend to themselves, because their weights would be 0 / 0."""
    is_alone = ~mask.any(-1, keepdim=True)
    if mask.shape[2] == 1:
        return mask | is_alone
    diagonal = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return mask | (diagonal & is_alone)


def added_mask(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "#batch 1 #seq seq"]:
    """Return the mask that is added to scores: 0 for visible pairs, minus infinity elsewhere."""
    if span.mask is not None and span.mask.dtype != torch.bool:
        return span.mask.to(dtype)
    visible = seen_pairs(span, num_sequences, seq_length, device)
    # Memory-efficient attention copies a mask whose row stride is not aligned, in every layer.
    width = -(-seq_length // _ALIGNMENT) * _ALIGNMENT
    mask = torch.zeros((*visible.shape[:-1], width), dtype=dtype, device=device)[..., :seq_length]
    return mask.masked_fill_(~visible, -torch.inf)
