"""Cut of tensors along the sequence into the pieces of context parallelism, and their order."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, reduce_from_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.context_parallel.blocks import taken
from lightning_megatron.plan.context import ContextCut, context_multiple
from lightning_megatron.shapes import Shaped


def own_part(
    tensor: Shaped[Tensor, "..."], axis: MeshAxis, dim: int = 0, cut: TokenOrder | None = None
) -> Shaped[Tensor, "..."]:
    """Return this rank's two pieces of a whole sequence, or of each of its documents.

    Autograd gives the positions of other ranks the gradient zero: each rank computes the share of
    its positions, and the mean over the data ranks, which include the ranks of cp, adds the shares.

    Args:
        dim: Dimension of the sequence; with documents 0 or 1, and the other one is the batch.
        cut: Positions that each rank holds; None means that whole sequences are cut.
    """
    if axis.size == 1 or (cut is not None and cut.size == 1):
        return tensor
    if cut is not None:
        return taken(tensor.transpose(0, dim), cut.order[:, axis.rank]).transpose(0, dim)
    ranges = ContextCut(axis.size, tensor.shape[dim]).ranges(axis.rank)
    return torch.cat([tensor.narrow(dim, rows.start, len(rows)) for rows in ranges], dim)


def join_parts(
    tensor: Shaped[Tensor, "..."], axis: MeshAxis, dim: int = 0, cut: TokenOrder | None = None
) -> Shaped[Tensor, "..."]:
    """Return the whole sequence on every rank, from the two pieces that each rank holds.

    The backward pass sums the gradients of all ranks for a piece. If all ranks compute the same
    loss from the result, each piece gets ``axis.size`` times the gradient of that loss, which the
    mean over the data ranks divides by ``axis.size``. The arguments are those of :func:`own_part`.

    Communication: an all-gather forward, a reduce-scatter backward.
    """
    if axis.size == 1 or (cut is not None and cut.size == 1):
        return tensor
    joined = all_gather_sequence(tensor.transpose(0, dim), axis)
    whole = ContextCut(axis.size, joined.shape[0]) if cut is None else cut
    return in_sequence_order(joined, whole).transpose(0, dim)


def at_place(
    part: Shaped[Tensor, "seq_part batch ..."],
    place: int,
    axis: MeshAxis,
    cut: TokenOrder | None = None,
) -> Shaped[Tensor, "batch ..."]:
    """Return the vector of one position of whole rows, on every rank.

    Communication: an all-reduce forward, none backward.
    """
    if axis.size == 1 or (cut is not None and cut.size == 1):
        return part[place]
    length, num_sequences = part.shape[:2]
    if cut is None:
        rows = ContextCut(axis.size, axis.size * length)
        held = [place in rows.positions(rank) for rank in range(axis.size)]
        rank = held.index(True)
        index = torch.full((num_sequences,), rank * length + rows.positions(rank).index(place))
    else:
        index = cut.places[:, place]
    index = index.to(part.device)
    local = part[index % length, torch.arange(num_sequences, device=part.device)]
    is_elsewhere = (index // length != axis.rank).view(-1, *[1] * (local.dim() - 1))
    return reduce_from_axis(local.masked_fill(is_elsewhere, 0.0), axis)


def of_first_rank(value: Shaped[Tensor, "..."], axis: MeshAxis) -> Shaped[Tensor, "..."]:
    """Broadcast the value of the rank that holds the first tokens of the rows.

    The backward pass gives that rank the sum of the gradients of all ranks, and the other ranks
    zeros, as in :func:`join_parts`.

    Communication: an all-gather forward, a reduce-scatter backward.
    """
    return value if axis.size == 1 else all_gather_sequence(value[None], axis)[0]


def in_sequence_order(
    joined: Shaped[Tensor, "..."], cut: ContextCut | TokenOrder
) -> Shaped[Tensor, "..."]:
    """Sort the joined parts of all ranks along the first dimension into the sequence's order."""
    if isinstance(cut, TokenOrder):
        return taken(joined, cut.places)
    pieces = joined.split(cut.piece)
    return torch.cat([pieces[at] for at in cut.sequence_order()])


def in_rank_order(
    ordered: Shaped[Tensor, "..."], cut: ContextCut | TokenOrder
) -> Shaped[Tensor, "..."]:
    """Return the parts of all ranks, joined; the inverse of :func:`in_sequence_order`."""
    if isinstance(cut, TokenOrder):
        return taken(ordered, cut.order.flatten(1))
    pieces = ordered.split(cut.piece)
    order = cut.sequence_order()
    return torch.cat([pieces[order.index(at)] for at in range(len(order))])


def length_multiple(mesh: ParallelMesh, *, is_cut: bool = True) -> int:
    """Return the divisor of all legal lengths of rows (tokens), which cp cuts if ``is_cut``."""
    cp = mesh.cp.size if is_cut else 1
    return context_multiple(cp, mesh.tp.size if mesh.sequence_parallel else 1)
