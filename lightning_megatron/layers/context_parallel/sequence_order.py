"""Cut of tensors along the sequence into the pieces of context parallelism, and their order."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.plan.context import ContextCut
from lightning_megatron.shapes import Shaped


def own_part(tensor: Shaped[Tensor, "..."], axis: MeshAxis, dim: int = 0) -> Shaped[Tensor, "..."]:
    """Return this rank's two pieces of a whole sequence.

    Autograd gives the positions of other ranks the gradient zero: each rank computes its own
    positions' share, and the mean over the data ranks, which include those of cp, adds the shares.

    Args:
        tensor: Tensor with the whole sequence along ``dim``.
        axis: Ranks that share the sequence.
        dim: Dimension of the sequence.

    Raises:
        ParallelPlanError: If the length is not a multiple of twice the ranks.
    """
    if axis.size == 1:
        return tensor
    ranges = ContextCut(axis.size, tensor.shape[dim]).ranges(axis.rank)
    return torch.cat([tensor.narrow(dim, rows.start, len(rows)) for rows in ranges], dim)


def joined_parts(
    tensor: Shaped[Tensor, "..."], axis: MeshAxis, dim: int = 0
) -> Shaped[Tensor, "..."]:
    """Return the whole sequence on every rank, from the two pieces that each rank holds.

    Backward sums the gradients that the ranks have for a piece. If all ranks compute the same loss
    from the result, each piece gets the gradient of that loss ``axis.size`` times, which the mean
    over the data ranks takes back.

    Args:
        tensor: This rank's pieces along ``dim``.
        axis: Ranks that share the sequence.
        dim: Dimension of the sequence.

    Communication: an all-gather forward, a reduce-scatter backward.
    """
    if axis.size == 1:
        return tensor
    cut = ContextCut(axis.size, axis.size * tensor.shape[dim])
    joined = all_gather_sequence(tensor.transpose(0, dim), axis)
    return in_sequence_order(joined, cut).transpose(0, dim)


def in_sequence_order(
    joined: Shaped[Tensor, "..."], cut: ContextCut, ranks: range | None = None
) -> Shaped[Tensor, "..."]:
    """Sort the pieces of ranks whose parts were joined along the first dimension.

    Args:
        joined: Parts of the ranks, one after the other.
        cut: Cut of the whole sequence.
        ranks: Ranks of the cut whose parts these are; None means all.
    """
    pieces = joined.split(cut.piece)
    return torch.cat([pieces[at] for at in cut.sequence_order(ranks)])


def in_rank_order(
    ordered: Shaped[Tensor, "..."], cut: ContextCut, ranks: range | None = None
) -> Shaped[Tensor, "..."]:
    """Return the parts of ranks, one after the other; the inverse of :func:`in_sequence_order`.

    Args:
        ordered: Pieces of the ranks in the order of the sequence, along the first dimension.
        cut: Cut of the whole sequence.
        ranks: Ranks of the cut whose parts these are; None means all.
    """
    pieces = ordered.split(cut.piece)
    order = cut.sequence_order(ranks)
    return torch.cat([pieces[order.index(at)] for at in range(len(order))])
