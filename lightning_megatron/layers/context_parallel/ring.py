"""Attention whose keys and values travel around a ring of ranks, or are gathered by all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.groups.p2p import PendingTransfers, start_transfers
from lightning_megatron.layers.context_parallel.partial_attention import (
    PartialSum,
    add_blocks,
    add_gradients,
    dtype_of_sums,
)
from lightning_megatron.layers.context_parallel.sequence_order import in_sequence_order
from lightning_megatron.plan.context import AttentionBlock, ContextCut
from lightning_megatron.shapes import Float


def ring_attention(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    axis: MeshAxis,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention over a whole sequence whose parts lie on the ranks of an axis.

    Each rank holds two pieces of the sequence, as in
    :class:`~lightning_megatron.plan.context.ContextCut`. In ``axis.size`` steps it meets the keys
    and values of every rank: while it computes with those of one rank, those of the next are on
    their way. The partial results are summed as in
    :class:`~lightning_megatron.layers.context_parallel.partial_attention.PartialSum`. Backward
    sends keys and values around once more, and their gradients after them.

    Equal to ``layers.attention_core.attend`` of the whole sequence, up to the order of sums.

    Args:
        query: Queries of this rank's pieces.
        key: Keys of this rank's pieces.
        value: Values of this rank's pieces.
        axis: Ranks that share the sequence, in the order of the cut.
        causal: Whether a position attends only to itself and to earlier positions.
        window: Number of positions that a query attends to, itself included; None means all
            (tokens).
        scale: Factor of the scores; None means ``head_dim ** -0.5``.

    Communication: forward ``axis.size - 1`` exchanges with both neighbours, of keys and values;
        backward the same, and ``axis.size`` exchanges of their gradients in at least float32.
    Source: Liu et al. 2023 (ring attention); Brandon et al. 2023 (balanced causal work).
    """
    cut = ContextCut(axis.size, axis.size * query.shape[0])
    blocks = [cut.ring_blocks(axis.rank, source, causal, window) for source in range(axis.size)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(query, torch.stack((key, value)), axis, blocks, scale)


def gathered_attention(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    axis: MeshAxis,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention of this rank's queries to the gathered keys and values of all ranks.

    Equal to :func:`ring_attention`. It takes one message instead of several, and the memory of the
    whole sequence's keys and values: good for few key/value heads.

    Args:
        query: Queries of this rank's pieces.
        key: Keys of this rank's pieces.
        value: Values of this rank's pieces.
        axis: Ranks that share the sequence, in the order of the cut.
        causal: Whether a position attends only to itself and to earlier positions.
        window: Number of positions that a query attends to, itself included; None means all
            (tokens).
        scale: Factor of the scores; None means ``head_dim ** -0.5``.

    Communication: an all-gather of keys and values forward, a reduce-scatter of their gradients
        backward.
    """
    cut = ContextCut(axis.size, axis.size * query.shape[0])
    joined = all_gather_sequence(torch.stack((key, value), dim=1), axis)
    both = in_sequence_order(joined, cut).transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    blocks = cut.gathered_blocks(axis.rank, causal, window)
    # A ring of one rank, which holds all keys.
    return _Ring.apply(query, both, MeshAxis(axis.name), [blocks], scale)


class _Ring(torch.autograd.Function):
    """Attention to the keys and values of all ranks of a ring, one rank after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        both: Tensor,
        axis: MeshAxis,
        blocks: list[list[AttentionBlock]],
        scale: float,
    ) -> Tensor:
        total = PartialSum(query)
        for source, keys, values in _visits(both, axis):
            add_blocks(total, query, keys, values, blocks[source], scale)
        out = total.out.to(query.dtype)
        ctx.save_for_backward(query, both, out, total.log_sum)
        ctx.axis = axis
        ctx.blocks = blocks
        ctx.scale = scale
        return out.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, both, out, log_sum = ctx.saved_tensors
        grad = grads[0].unflatten(-1, query.shape[2:]).permute(1, 2, 0, 3)
        dtype = dtype_of_sums(query.dtype)
        of_query = torch.zeros_like(query, dtype=dtype)
        arriving: Tensor | None = None
        pending = PendingTransfers()
        for source, keys, values in _visits(both, ctx.axis):
            of_both = torch.zeros_like(both, dtype=dtype)
            add_gradients(
                (of_query, of_both[0], of_both[1]),
                *(grad, query, keys, values, out, log_sum, ctx.blocks[source], ctx.scale),
            )
            # What the ranks behind this one have added so far for the same keys.
            pending.wait()
            if arriving is not None:
                of_both += arriving
            arriving, pending = _pass_on(of_both, ctx.axis)
        pending.wait()
        assert arriving is not None, "a ring has at least one rank"
        return of_query.to(query.dtype), arriving.to(both.dtype), None, None, None


def _visits(both: Tensor, axis: MeshAxis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Give the keys and values of every rank, this one's first, while the next ones travel."""
    for step in range(axis.size):
        arriving = both
        pending = PendingTransfers()
        if step + 1 < axis.size:
            arriving, pending = _pass_on(both, axis)
        yield (axis.rank - step) % axis.size, both[0], both[1]
        pending.wait()
        both = arriving


def _pass_on(tensor: Tensor, axis: MeshAxis) -> tuple[Tensor, PendingTransfers]:
    """Start to send a tensor to the next rank, and to receive that of the previous one."""
    if axis.size == 1:
        return tensor, PendingTransfers()
    sent = tensor.contiguous()
    arriving = torch.empty_like(sent)
    following = (axis.rank + 1) % axis.size
    previous = (axis.rank - 1) % axis.size
    return arriving, start_transfers([(sent, following)], [(arriving, previous)], axis)
