"""Zig-zag cut of packed documents over the ranks that share their rows, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.plan.context import check_context_length
from lightning_megatron.shapes import Int


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Positions of each row that every rank holds, if several ranks share the rows.

    Args:
        size: Number of ranks that share the rows; 1 means that every rank has all positions.
        order: Position in the row of each token of each rank.
        places: Index of each position in the concatenation of all ranks' parts; the inverse of
            ``order``.
    """

    size: int
    order: Int[Tensor, "batch ranks seq_part"]
    places: Int[Tensor, "batch seq"]

    @classmethod
    def uncut(cls, num_sequences: int, seq_length: int, device: torch.device) -> TokenOrder:
        """Return the order of rows of which every rank holds all tokens."""
        index = torch.arange(seq_length, device=device).expand(num_sequences, -1)
        return cls(1, index[:, None], index)


@dataclass(frozen=True, eq=False)
class DocumentCut(TokenOrder):
    """Cut of every document of a batch into ``2 size`` pieces, of which each rank holds two.

    As in :class:`~lightning_megatron.plan.context.ContextCut`, rank ``r`` holds the pieces ``r``
    and ``2 size - 1 - r``, but of every document, so that the causal work of each document is
    balanced. The sizes of a document's pieces differ by at most one token. The longer pieces rotate
    from document to document, so that all ranks hold the same number of tokens of a row, without
    padding. All shapes follow from the shape of the batch, and the host reads no value from the
    device. A rank holds its tokens in the order of the row.

    Args:
        halves: Indices into a rank's part: first the tokens of its early pieces, then the tokens of
            its late pieces.
        part_borders: Cumulative lengths of the documents' parts on each rank (tokens).
        piece_borders: Cumulative lengths of the documents' pieces with each number (tokens).
        prefixes: For this rank's early and its late pieces: the positions of the tokens of all
            documents up to the end of these pieces, and the cumulative lengths of these beginnings
            of documents (tokens).
        longest_piece: Upper bound of the length of a piece (tokens).
        longest: Upper bound of the documents' lengths (tokens).
    """

    halves: Int[Tensor, "batch ranks seq_part"]
    part_borders: Int[Tensor, "ranks borders"]
    piece_borders: Int[Tensor, "pieces borders"]
    prefixes: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    longest_piece: int
    longest: int

    @classmethod
    def of(
        cls,
        borders: Int[Tensor, " borders"],
        num_sequences: int,
        seq_length: int,
        size: int,
        rank: int,
        *,
        longest: int | None = None,
    ) -> DocumentCut:
        """Cut the documents of a batch.

        Args:
            borders: Cumulative lengths of all documents of all rows, equally many in each row
                (tokens).
            seq_length: Length of the rows, a multiple of ``2 size`` (tokens).
            longest: Upper bound of the documents' lengths; None means the length of the rows
                (tokens).
        """
        check_context_length(seq_length, size)
        longest = min(longest or seq_length, seq_length)
        starts = _piece_starts(borders.long(), num_sequences, 2 * size)
        sizes = starts.diff(dim=1)
        tokens = torch.arange(num_sequences * seq_length, device=borders.device)
        # If several pieces start at the same token, all but the last one are empty.
        piece_index = torch.searchsorted(starts[:, :-1].flatten(), tokens, right=True) - 1
        pieces = (piece_index % (2 * size)).view(num_sequences, seq_length)
        return _cut(pieces, sizes, rank, longest // (2 * size) + 1, longest)


def _piece_starts(borders: Tensor, num_sequences: int, num_pieces: int) -> Tensor:
    """Return the first token of each piece of each document, and the document's end."""
    lengths = borders.diff()
    extra = lengths % num_pieces
    # The longer pieces of a document are those after the longer pieces of the document before it,
    # so that the pieces with one number have the same total length in a row.
    of_rows = extra.view(num_sequences, -1)
    first = ((of_rows.cumsum(1) - of_rows) % num_pieces).flatten()[:, None]
    extra = extra[:, None]
    index = torch.arange(num_pieces + 1, device=borders.device)
    wrapped = (first + extra - num_pieces).clamp(min=0)
    longer = (index - first).clamp(min=0).minimum(extra) + index.minimum(wrapped)
    return borders[:-1, None] + index * (lengths // num_pieces)[:, None] + longer


def _cut(pieces: Tensor, sizes: Tensor, rank: int, longest_piece: int, longest: int) -> DocumentCut:
    """Return the cut from each token's piece and the sizes of the pieces of the documents."""
    num_pieces = sizes.shape[1]
    size = num_pieces // 2
    length = pieces.shape[1] // num_pieces
    ranks = pieces.minimum(num_pieces - 1 - pieces)
    order = ranks.argsort(dim=1, stable=True)
    is_late = pieces.gather(1, order).unflatten(1, (size, -1)) >= size
    # The pieces up to ``last`` have the same number of tokens in all rows, for any documents.
    prefixes = tuple(
        (
            (pieces > last).int().argsort(dim=1, stable=True)[:, : (last + 1) * length],
            _borders(sizes[:, : last + 1].sum(1)[:, None])[0],
        )
        for last in (rank, num_pieces - 1 - rank)
    )
    return DocumentCut(
        size,
        order.unflatten(1, (size, -1)),
        order.argsort(1),
        is_late.int().argsort(dim=2, stable=True),
        _borders(sizes[:, :size] + sizes[:, size:].flip(1)),
        _borders(sizes),
        (prefixes[0], prefixes[1]),
        longest_piece,
        longest,
    )


def _borders(sizes: Tensor) -> Tensor:
    """Return the cumulative sizes of each column, in the dtype and layout that kernels take."""
    return F.pad(sizes.cumsum(0), (0, 0, 1, 0)).t().contiguous().to(torch.int32)
