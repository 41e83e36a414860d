"""Blocks of queries and keys with visible pairs, for kernels that skip all other blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_megatron.layers.attention.dense_mask import KeyRows, places_from_end
from lightning_megatron.layers.attention.span import AttentionSpan, document_of_tokens
from lightning_megatron.shapes import Bool, Int

#: Number of queries, and of keys, in a block (tokens).
BLOCK = 128


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Places and documents of queries or of keys.

    Args:
        places: Place of each token. The place of a query minus the place of a key of the same
            document is their distance.
        documents: Document of each token; None means one document for each row.
        in_order: Whether places are the indices of the tokens.
    """

    places: Int[Tensor, "#batch seq"]
    documents: Int[Tensor, "#batch seq"] | None
    in_order: bool

    @property
    def length(self) -> int:
        return self.places.shape[1]

    def bounds(self, values: Int[Tensor, "#batch seq"]) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each block."""
        index = torch.arange(-(-self.length // BLOCK) * BLOCK, device=values.device)
        blocks = values[:, index.clamp(max=self.length - 1)].unflatten(1, (-1, BLOCK))
        return blocks.amin(-1), blocks.amax(-1)

    @property
    def is_full(self) -> Bool[Tensor, "1 _"]:
        """Return for each block whether it is full; the last one may have fewer than ``BLOCK``."""
        starts = torch.arange(0, self.length, BLOCK, device=self.places.device)
        return (starts + BLOCK <= self.length)[None]


def visible_blocks(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    keys: KeyRows | None = None,
) -> BlockMask:
    """Return the blocks with visible pairs, and the blocks in which all pairs are visible.

    Equal to ``create_block_mask`` with the rule for pairs of a span without a mask, which computes
    a tensor with an entry for each pair of tokens. This function computes one entry for each pair
    of blocks. The host reads no value from the device, so that a CUDA graph can capture the call.
    With documents and ``keys``, blocks may be listed although no pair in them is visible.
    """
    is_whole = keys is None and span.borders is None and span.prefix is None
    if not is_whole or _is_capturing(device):
        # Memory that a capture allocates belongs to the graph, so the cache must not refer to it.
        return _blocks(span, num_sequences, seq_length, device, keys)
    return _blocks_of_whole_rows(span.causal, span.window, seq_length, device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=16)
def _blocks_of_whole_rows(
    causal: bool, window: int | None, seq_length: int, device: torch.device
) -> BlockMask:
    return _blocks(AttentionSpan(causal=causal, window=window), 1, seq_length, device)


def _blocks(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    key_rows: KeyRows | None = None,
) -> BlockMask:
    queries, keys = _queries_and_keys(span, num_sequences, seq_length, device, key_rows)
    visible, whole = _visible_and_full(span, queries, keys)
    partly_numbers, partly = _ordered(visible & ~whole)
    whole_numbers, wholly = _ordered(whole)
    return BlockMask.from_kv_blocks(
        partly_numbers,
        partly,
        whole_numbers,
        wholly,
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(span, num_sequences, queries, keys),
        seq_lengths=(seq_length, keys.length),
    )


def _queries_and_keys(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    device: torch.device,
    keys: KeyRows | None,
) -> tuple[_Tokens, _Tokens]:
    if keys is None:
        documents = None
        if span.borders is not None:
            documents = document_of_tokens(span.borders, num_sequences, seq_length)
        index = torch.arange(seq_length, device=device)[None]
        tokens = _Tokens(index, documents, in_order=True)
        return tokens, tokens
    # Places count from the end of a document, as in flash attention.
    of_queries, query_left = places_from_end(span.borders, num_sequences, seq_length, device)
    of_keys, key_left = places_from_end(keys.borders, num_sequences, keys.seq_length, device)
    queries = _Tokens(-query_left, of_queries, in_order=False)
    others = _Tokens(-key_left - keys.behind, of_keys, in_order=False)
    if span.borders is None:
        return replace(queries, documents=None), replace(others, documents=None)
    return queries, others


def _ordered(blocks: Bool[Tensor, "#batch 1 _ _"]) -> tuple[Tensor, Tensor]:
    """Return for each query block the number of chosen key blocks, and indices with these first."""
    numbers = blocks.sum(-1, dtype=torch.int32)
    # A stable sort keeps adjacent blocks in order, so they are read one after the other.
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return numbers, order.to(torch.int32)


def _visible_and_full(
    span: AttentionSpan, queries: _Tokens, keys: _Tokens
) -> tuple[Bool[Tensor, "#batch 1 _ _"], Bool[Tensor, "#batch 1 _ _"]]:
    """Return which blocks may have visible pairs, and which have only visible pairs."""
    first, last = queries.bounds(queries.places)
    key_first, key_last = keys.bounds(keys.places)
    # The nearest and the farthest pair of two blocks, as query minus key.
    least = first[:, :, None] - key_last[:, None, :]
    most = last[:, :, None] - key_first[:, None, :]
    visible = torch.ones_like(least, dtype=torch.bool)
    full = queries.is_full[:, :, None] & keys.is_full[:, None, :]
    whole = full
    if span.causal:
        visible = visible & (most >= 0)
        whole = whole & (least >= 0)
    if span.window is not None:
        nearest = least.clamp(min=0) + (-most).clamp(min=0)
        visible = visible & (nearest < span.window)
        whole = whole & (torch.maximum(least.abs(), most.abs()) < span.window)
    if queries.documents is not None and keys.documents is not None:
        lows, highs = queries.bounds(queries.documents)
        key_lows, key_highs = keys.bounds(keys.documents)
        visible = visible & (lows[:, :, None] <= key_highs[:, None, :])
        visible = visible & (key_lows[:, None, :] <= highs[:, :, None])
        whole = whole & (lows[:, :, None] == key_highs[:, None, :])
        whole = whole & (key_lows[:, None, :] == highs[:, :, None])
    if span.prefix is not None:
        prefix = span.prefix[:, None, None]
        visible = visible | (key_first[:, None, :] < prefix)
        whole = whole | (full & (key_last[:, None, :] < prefix))
    return visible[:, None], whole.expand_as(visible)[:, None]


def _rule(
    span: AttentionSpan, num_sequences: int, queries: _Tokens, keys: _Tokens
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the span's rule as a function of row, head, query and key that the kernel inlines."""
    causal = span.causal
    window = span.window
    prefix = span.prefix
    places = documents = None
    if not queries.in_order and (causal or window is not None):
        places = _of_all_rows(num_sequences, queries.places, keys.places)
    if queries.documents is not None and keys.documents is not None:
        documents = _of_all_rows(num_sequences, queries.documents, keys.documents)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key
        if places is not None:
            distance = places[0][row, query] - places[1][row, key]
        visible = distance >= 0 if causal else query == query
        if window is not None:
            visible = visible & (distance < window) & (-distance < window)
        if documents is not None:
            visible = visible & (documents[0][row, query] == documents[1][row, key])
        if prefix is not None:
            visible = visible | (key < prefix[row])
        return visible

    return sees


def _of_all_rows(num_sequences: int, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(value.expand(num_sequences, -1).contiguous() for value in values)
