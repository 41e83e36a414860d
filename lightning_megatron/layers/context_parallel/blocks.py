"""Blocks of queries and keys into which context parallelism divides attention.

``layers.attention.parts`` computes the attention of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.layers.attention.document_cut import DocumentCut
from lightning_megatron.layers.attention.operators import KeyRows
from lightning_megatron.layers.attention.span import AttentionSpan, borders_of
from lightning_megatron.plan.context import AttentionBlock, ContextCut
from lightning_megatron.shapes import Bool, Int, Shaped

#: Positions of a part: a slice, or a tensor (batch, rows) of indices for each row of the batch.
Rows = slice | Tensor
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Block:
    """Attention of some of a rank's queries to some keys.

    Args:
        queries: Positions of the queries in this rank's part.
        keys: Positions of the keys in the tensor that holds them.
        span: Which tokens attend to which, with the documents of these queries.
    """

    queries: Rows
    keys: Rows
    span: AttentionSpan
    key_rows: KeyRows


def ring_blocks(
    span: AttentionSpan, seq_part: int, size: int, rank: int, device: torch.device
) -> list[list[Block]]:
    """Return the attention of a rank's queries to the keys of every rank of a ring.

    A span with documents has no window. ``seq_part`` counts the tokens of a row that a rank holds.
    """
    cut = span.cut
    rows = ContextCut(size, size * seq_part)
    if hides_keys(span):
        visible = _visible_keys(span)
        sources = (_places_of(source, rows, device)[0] for source in range(size))
        return [[_of_visible(span, visible[:, places], seq_part)] for places in sources]
    if cut is not None:
        ring = [_of_documents(span, cut, seq_part, rank, source) for source in range(size)]
    else:
        ring = []
        for source in range(size):
            planned = rows.ring_blocks(rank, source, span.causal, span.window)
            ring.append([_of_rows(span, block) for block in planned])
    if span.slopes is None:
        return ring
    held = [_places_of(source, cut or rows, device) for source in range(size)]
    placed = []
    for blocks, keys in zip(ring, held, strict=True):
        placed.append([_placed(block, held[rank], keys) for block in blocks])
    return placed


def gathered_blocks(
    span: AttentionSpan, seq_part: int, size: int, rank: int, device: torch.device
) -> list[Block]:
    """Return the attention of a rank's queries to the keys of whole rows, in their order."""
    length = size * seq_part
    rows = ContextCut(size, length)
    if hides_keys(span):
        return [_of_visible(span, _visible_keys(span), seq_part)]
    if span.cut is None:
        planned = rows.gathered_blocks(rank, span.causal, span.window)
        blocks = [_of_rows(span, block) for block in planned]
    else:
        blocks = _of_whole_documents(span, span.cut, length, rank)
    if span.slopes is None:
        return blocks
    held = _places_of(rank, span.cut or rows, device)
    keys = torch.arange(length, device=device)[None].expand(len(held), -1)
    return [_placed(block, held, keys) for block in blocks]


def hides_keys(span: AttentionSpan) -> bool:
    """Return whether a span is bidirectional attention to the keys that a boolean mask shows.

    Its mask is the same for all queries of a row, so parts of the rows need no mask of pairs.
    """
    mask = span.mask
    if mask is None or mask.dtype != torch.bool or mask.shape[2] != 1:
        return False
    return not span.causal and span.window is None and span.slopes is None


def _visible_keys(span: AttentionSpan) -> Bool[Tensor, "batch seq"]:
    """Return which keys of full rows are visible; in a row without visible keys, all are."""
    assert span.mask is not None, "a span that hides keys has a mask"
    mask = span.mask[:, 0, 0]
    return mask | ~mask.any(1, keepdim=True)


def _of_visible(span: AttentionSpan, visible: Bool[Tensor, "batch _"], num_queries: int) -> Block:
    """Return the block of all queries of a rank and of the visible keys among some keys.

    The visible keys of a row come first and form one document with all queries of the row. The
    other keys form a document without queries.
    """
    num_rows, num_keys = visible.shape
    counts = visible.sum(1, keepdim=True)
    visible_span = _documents(
        replace(span, mask=None),
        borders_of(torch.full_like(counts, num_queries), num_queries),
        num_queries,
        causal=False,
    )
    keys = KeyRows(num_keys, borders_of(counts, num_keys), num_keys)
    return Block(_ALL, (~visible).int().argsort(dim=1, stable=True), visible_span, keys)


def _of_whole_documents(
    span: AttentionSpan, cut: DocumentCut, length: int, rank: int
) -> list[Block]:
    """Return the blocks of a rank's queries and of the keys of whole rows, with cut documents."""
    size = cut.size
    if not span.causal:
        whole = KeyRows(length, span.borders, cut.longest)
        borders = cut.part_borders[rank]
        query_span = _documents(span, borders, 2 * cut.longest_piece, causal=False)
        return [Block(_ALL, _ALL, query_span, whole)]
    halves = cut.halves[:, rank].unflatten(1, (2, -1)).unbind(1)
    blocks = []
    for piece, rows, (keys, borders) in zip(
        (rank, 2 * size - 1 - rank), halves, cut.prefixes, strict=True
    ):
        query_span = _documents(span, cut.piece_borders[piece], cut.longest_piece, causal=True)
        blocks.append(Block(rows, keys, query_span, KeyRows(keys.shape[1], borders, cut.longest)))
    return blocks


def taken(tensor: Shaped[Tensor, "seq batch ..."], rows: Rows) -> Shaped[Tensor, "_ batch ..."]:
    """Return some positions of a tensor, which may differ between the rows of the batch."""
    if isinstance(rows, slice):
        return tensor[rows]
    index = in_flat_order(rows)
    return tensor.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)


def add_at(
    tensor: Shaped[Tensor, "seq batch ..."], rows: Rows, values: Shaped[Tensor, "_ batch ..."]
) -> None:
    """Add values to some positions of a contiguous tensor, each of them once, in place."""
    if isinstance(rows, slice):
        tensor[rows] += values
    else:
        values = values.flatten(0, 1).to(tensor.dtype)
        tensor.view(-1, *tensor.shape[2:]).index_add_(0, in_flat_order(rows).flatten(), values)


def put_at(
    tensor: Shaped[Tensor, "seq batch ..."], rows: Rows, values: Shaped[Tensor, "_ batch ..."]
) -> None:
    """Replace some positions of a contiguous tensor, each of them once, in place."""
    if isinstance(rows, slice):
        tensor[rows] = values
    else:
        index = in_flat_order(rows).flatten()
        tensor.view(-1, *tensor.shape[2:]).index_copy_(0, index, values.flatten(0, 1))


def in_flat_order(rows: Int[Tensor, "batch seq"]) -> Int[Tensor, "seq batch"]:
    """Return the indices of positions in a tensor whose first two dimensions are flattened."""
    num_sequences = len(rows)
    return rows.t() * num_sequences + torch.arange(num_sequences, device=rows.device)


def _of_rows(span: AttentionSpan, block: AttentionBlock) -> Block:
    # The offset is relative to the first query and key, ``behind`` to the last ones.
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
    """Return the single block for the keys of a source rank: :meth:`ContextCut.ring_blocks`."""
    borders = cut.part_borders[rank]
    longest = 2 * cut.longest_piece
    keys = KeyRows(seq_part, cut.part_borders[source], longest)
    if not span.causal or source == rank:
        return [Block(_ALL, _ALL, _documents(span, borders, longest, causal=span.causal), keys)]
    half = seq_part // 2
    if source < rank:
        early = KeyRows(half, cut.piece_borders[source], cut.longest_piece)
        query_span = _documents(span, borders, longest, causal=False)
        return [Block(_ALL, cut.halves[:, source, :half], query_span, early)]
    late_borders = cut.piece_borders[2 * cut.size - 1 - rank]
    late_span = _documents(span, late_borders, cut.longest_piece, causal=False)
    return [Block(cut.halves[:, rank, half:], _ALL, late_span, keys)]


def _documents(
    span: AttentionSpan, borders: Tensor, longest: int, *, causal: bool
) -> AttentionSpan:
    return replace(span, borders=borders, longest=longest, causal=causal, sinks=None, cut=None)


def _places_of(rank: int, cut: ContextCut | DocumentCut, device: torch.device) -> Tensor:
    if isinstance(cut, DocumentCut):
        return cut.order[:, rank]
    pieces = (torch.arange(piece.start, piece.stop, device=device) for piece in cut.ranges(rank))
    return torch.cat(tuple(pieces))[None]


def _placed(block: Block, queries: Tensor, keys: Tensor) -> Block:
    """Return a block with the places of its queries and keys, chosen from those of both parts."""

    def chosen(places: Tensor, rows: Rows) -> Tensor:
        return places[:, rows] if isinstance(rows, slice) else places.gather(1, rows)

    return replace(
        block,
        span=replace(block.span, places=chosen(queries, block.queries)),
        key_rows=replace(block.key_rows, places=chosen(keys, block.keys)),
    )
