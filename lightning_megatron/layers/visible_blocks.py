"""Blocks of queries and keys that attention has to visit, for kernels that skip the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_megatron.layers.attention_span import AttentionSpan, document_of_tokens
from lightning_megatron.shapes import Bool

#: Queries, and keys, of a block (tokens).
BLOCK = 128


def visible_blocks(
    span: AttentionSpan, num_sequences: int, seq_length: int, device: torch.device
) -> BlockMask:
    """Return the blocks that a span lets queries see, and which of them it lets them see whole.

    Equal to ``create_block_mask`` with the span's rule for pairs, which computes a tensor with an
    entry for each pair of tokens. This function computes one entry for each pair of blocks. The
    host reads no value, so that it may run inside a captured region.

    Args:
        span: Description of the attention, laid out or without documents, and without a mask.
        num_sequences: Number of rows (sequences).
        seq_length: Length of the rows (tokens).
        device: Device of the queries.
    """
    if span.borders is not None or span.prefix is not None or _is_capturing(device):
        # Memory that a capture allocates belongs to its graph: no other call may use it.
        return _blocks(span, num_sequences, seq_length, device)
    return _blocks_of_whole_rows(span.causal, span.window, seq_length, device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=16)
def _blocks_of_whole_rows(
    causal: bool, window: int | None, seq_length: int, device: torch.device
) -> BlockMask:
    return _blocks(AttentionSpan(causal=causal, window=window), 1, seq_length, device)


def _blocks(
    span: AttentionSpan, num_sequences: int, seq_length: int, device: torch.device
) -> BlockMask:
    seen, whole = _seen_and_whole(span, num_sequences, seq_length, device)
    partly_numbers, partly = _ordered(seen & ~whole)
    whole_numbers, wholly = _ordered(whole)
    return BlockMask.from_kv_blocks(
        partly_numbers,
        partly,
        whole_numbers,
        wholly,
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(span, num_sequences, seq_length),
        seq_lengths=(seq_length, seq_length),
    )


def _ordered(blocks: Bool[Tensor, "#batch 1 _ _"]) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the number of its blocks of keys, and these first."""
    numbers = blocks.sum(-1, dtype=torch.int32)
    # Stable: neighbouring blocks are read one after the other.
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return numbers, order.to(torch.int32)


def _seen_and_whole(
    span: AttentionSpan, num_sequences: int, seq_length: int, device: torch.device
) -> tuple[Bool[Tensor, "#batch 1 _ _"], Bool[Tensor, "#batch 1 _ _"]]:
    """Return which blocks have a visible pair, and which have visible pairs alone."""
    starts = torch.arange(0, seq_length, BLOCK, device=device)
    first = starts[None, :]
    last = (starts + BLOCK - 1).clamp(max=seq_length - 1)[None, :]
    # The nearest and the farthest pair of two blocks, as query minus key.
    least = first[:, :, None] - last[:, None, :]
    most = last[:, :, None] - first[:, None, :]
    seen = torch.ones_like(least, dtype=torch.bool)
    is_full = last - first == BLOCK - 1
    full = is_full[:, None, :] & is_full[:, :, None]
    whole = full
    if span.causal:
        seen = seen & (most >= 0)
        whole = whole & (least >= 0)
    if span.window is not None:
        nearest = least.clamp(min=0) + (-most).clamp(min=0)
        seen = seen & (nearest < span.window)
        whole = whole & (torch.maximum(least.abs(), most.abs()) < span.window)
    if span.borders is not None:
        documents = document_of_tokens(span.borders, num_sequences, seq_length)
        lows = documents[:, starts]
        highs = documents[:, last[0]]
        seen = seen & (lows[:, :, None] <= highs[:, None, :])
        seen = seen & (lows[:, None, :] <= highs[:, :, None])
        whole = whole & (lows[:, :, None] == highs[:, None, :])
        whole = whole & (lows[:, None, :] == highs[:, :, None])
    if span.prefix is not None:
        prefix = span.prefix[:, None, None]
        seen = seen | (first[:, None, :] < prefix)
        whole = whole | (full & (last[:, None, :] < prefix))
    return seen[:, None], whole[:, None]


def _rule(
    span: AttentionSpan, num_sequences: int, seq_length: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the span as a function of row, head, query and key, which a kernel inlines."""
    causal = span.causal
    window = span.window
    prefix = span.prefix
    documents = None
    if span.borders is not None:
        documents = document_of_tokens(span.borders, num_sequences, seq_length)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key if causal else query == query
        if window is not None:
            seen = seen & (query - key < window) & (key - query < window)
        if documents is not None:
            seen = seen & (documents[row, query] == documents[row, key])
        if prefix is not None:
            seen = seen | (key < prefix[row])
        return seen

    return sees
