"""Blocks of queries and keys into which context parallelism divides attention, by rank of the keys.

``layers.attention_parts`` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.dense_mask import KeyRows
from lightning_megatron.layers.document_cut import DocumentCut
from lightning_megatron.plan.context import AttentionBlock, ContextCut
from lightning_megatron.shapes import Int, Shaped

#: Rows of a part: neighbouring ones, or those whose indices a tensor (batch, rows) has.
Rows = slice | Tensor
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Block:
    """Attention of some of a rank's queries to some keys.

    Args:
        queries: Rows of the queries.
        keys: Rows of the keys.
        span: Who attends to whom, with the documents of these queries.
        key_rows: Rows that the keys form.
    """

    queries: Rows
    keys: Rows
    span: AttentionSpan
    key_rows: KeyRows


def ring_blocks(span: AttentionSpan, seq_part: int, size: int, rank: int) -> list[list[Block]]:
    """Return the attention of a rank's queries to the keys of every rank of a ring.

    Args:
        span: Attention of the layer over whole rows; its documents have no window.
        seq_part: Positions of a row that a rank holds (tokens).
        size: Ranks of the ring (ranks).
        rank: Rank that holds the queries.
    """
    if span.cut is not None:
        return [_of_documents(span, span.cut, seq_part, rank, source) for source in range(size)]
    cut = ContextCut(size, size * seq_part)
    planned = [cut.ring_blocks(rank, source, span.causal, span.window) for source in range(size)]
    return [[_of_rows(span, one) for one in blocks] for blocks in planned]


def gathered_blocks(span: AttentionSpan, seq_part: int, size: int, rank: int) -> list[Block]:
    """Return the attention of a rank's queries to the keys of whole rows, in their order.

    Args:
        span: Attention of the layer over whole rows.
        seq_part: Positions of a row that a rank holds (tokens).
        size: Ranks that share the rows (ranks).
        rank: Rank that holds the queries.
    """
    length = size * seq_part
    cut = span.cut
    if cut is None:
        planned = ContextCut(size, length).gathered_blocks(rank, span.causal, span.window)
        return [_of_rows(span, one) for one in planned]
    if not span.causal:
        whole = KeyRows(length, span.borders, cut.longest)
        borders = cut.part_borders[rank]
        own = _documents(span, borders, 2 * cut.longest_piece, causal=False)
        return [Block(_ALL, _ALL, own, whole)]
    halves = cut.halves[:, rank].unflatten(1, (2, -1)).unbind(1)
    found = []
    for piece, rows, (keys, borders) in zip(
        (rank, 2 * size - 1 - rank), halves, cut.prefixes, strict=True
    ):
        own = _documents(span, cut.piece_borders[piece], cut.longest_piece, causal=True)
        found.append(Block(rows, keys, own, KeyRows(keys.shape[1], borders, cut.longest)))
    return found


def taken(tensor: Shaped[Tensor, "seq batch ..."], rows: Rows) -> Shaped[Tensor, "_ batch ..."]:
    """Return rows of a tensor, each row of the batch having its own.

    Args:
        tensor: Tensor, sequence first.
        rows: Rows of the sequence.
    """
    if isinstance(rows, slice):
        return tensor[rows]
    index = in_flat_order(rows)
    return tensor.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)


def add_at(
    tensor: Shaped[Tensor, "seq batch ..."], rows: Rows, values: Shaped[Tensor, "_ batch ..."]
) -> None:
    """Add values to rows of a contiguous tensor.

    Args:
        tensor: Tensor, sequence first.
        rows: Rows of the sequence, each of them once.
        values: Values of these rows.
    """
    if isinstance(rows, slice):
        tensor[rows] += values
    else:
        values = values.flatten(0, 1).to(tensor.dtype)
        tensor.view(-1, *tensor.shape[2:]).index_add_(0, in_flat_order(rows).flatten(), values)


def put_at(
    tensor: Shaped[Tensor, "seq batch ..."], rows: Rows, values: Shaped[Tensor, "_ batch ..."]
) -> None:
    """Replace rows of a contiguous tensor.

    Args:
        tensor: Tensor, sequence first.
        rows: Rows of the sequence, each of them once.
        values: Values of these rows.
    """
    if isinstance(rows, slice):
        tensor[rows] = values
    else:
        index = in_flat_order(rows).flatten()
        tensor.view(-1, *tensor.shape[2:]).index_copy_(0, index, values.flatten(0, 1))


def in_flat_order(rows: Int[Tensor, "batch seq"]) -> Int[Tensor, "seq batch"]:
    """Return where rows of each sequence lie in a tensor whose first two dimensions are joined.

    Args:
        rows: Indices of positions for every sequence.
    """
    num_sequences = len(rows)
    return rows.t() * num_sequences + torch.arange(num_sequences, device=rows.device)


def _of_rows(span: AttentionSpan, block: AttentionBlock) -> Block:
    # An offset counts from the starts of the ranges.
    behind = block.offset + len(block.queries) - len(block.keys) if block.is_causal else 0
    return Block(
        slice(block.queries.start, block.queries.stop),
        slice(block.keys.start, block.keys.stop),
        replace(span, causal=block.is_causal, window=block.window, sinks=None),
        KeyRows(len(block.keys), behind=behind),
    )


def _of_documents(
    span: AttentionSpan, cut: DocumentCut, seq_part: int, rank: int, source: int
) -> list[Block]:
    """Return the one block of a source, as in :meth:`ContextCut.ring_blocks`."""
    part = cut.part_borders[rank], 2 * cut.longest_piece
    keys = KeyRows(seq_part, cut.part_borders[source], 2 * cut.longest_piece)
    if not span.causal or source == rank:
        return [Block(_ALL, _ALL, _documents(span, *part, causal=span.causal), keys)]
    half = seq_part // 2
    if source < rank:
        early = KeyRows(half, cut.piece_borders[source], cut.longest_piece)
        own = _documents(span, *part, causal=False)
        return [Block(_ALL, cut.halves[:, source, :half], own, early)]
    late = cut.piece_borders[2 * cut.size - 1 - rank], cut.longest_piece
    return [Block(cut.halves[:, rank, half:], _ALL, _documents(span, *late, causal=False), keys)]


def _documents(
    span: AttentionSpan, borders: Tensor, longest: int, *, causal: bool
) -> AttentionSpan:
    return replace(span, borders=borders, longest=longest, causal=causal, sinks=None, cut=None)
