"""Attention whose keys and values go around a ring of ranks, or are all-gathered by them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.groups.pending import Pending, start_transfers
from lightning_megatron.layers.attention.parts import backward_part, forward_part
from lightning_megatron.layers.attention.span import (
    AttentionSpan,
    CoreResults,
    add_sinks,
    gradient_of_sinks,
)
from lightning_megatron.layers.context_parallel.blocks import (
    Block,
    Rows,
    add_at,
    gathered_blocks,
    put_at,
    ring_blocks,
    taken,
)
from lightning_megatron.layers.context_parallel.sequence_order import in_sequence_order
from lightning_megatron.plan.context import ContextCut
from lightning_megatron.shapes import Float


class PartialSum:
    """Sum of the partial results of attention over disjoint sets of keys.

    Let ``s_ij`` be the scaled score of query ``i`` and key ``j``. Attention over a set ``A`` of
    keys is ``o_A = sum_j exp(s_ij - l_A) v_j`` with ``l_A = log sum_j exp(s_ij)``. For disjoint
    sets ``A`` and ``B``::

        l = log(exp(l_A) + exp(l_B))
        o = exp(l_A - l) o_A + exp(l_B - l) o_B

    is attention over their union, exactly. A query without keys has ``l = -inf`` and ``o = 0``. The
    sums are in float32 for half types, and in the dtype of the queries otherwise.
    """

    def __init__(self, query: Float[Tensor, "seq batch heads head_dim"]) -> None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        self.out = query.new_zeros(query.shape, dtype=dtype)
        self._log_sum = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)

    @property
    def log_sum(self) -> Float[Tensor, "batch heads seq"]:
        """Return the logarithms of the sums of the exponentiated scores."""
        return self._log_sum.permute(1, 2, 0)

    def add(
        self,
        rows: Rows,
        out: Float[Tensor, "rows batch heads head_dim"],
        log_sum: Float[Tensor, "batch heads rows"],
    ) -> None:
        """Add the attention of some queries to keys that were not added for them before."""
        before = taken(self._log_sum, rows)
        added = log_sum.permute(2, 0, 1).to(before.dtype)
        total = torch.logaddexp(before, added)
        # For a query without keys so far, -inf - -inf would be NaN.
        shift = total.masked_fill(total.isneginf(), 0.0)
        old = (before - shift).exp().unsqueeze(-1)
        new = (added - shift).exp().unsqueeze(-1)
        put_at(self.out, rows, old * taken(self.out, rows) + new * out)
        put_at(self._log_sum, rows, total)


def ring_attention(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    axis: MeshAxis,
    span: AttentionSpan,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention over a whole sequence whose parts lie on the ranks of an axis.

    Each rank holds two pieces of the sequence, as in
    :class:`~lightning_megatron.plan.context.ContextCut`, or of every document, as in
    :class:`~lightning_megatron.layers.attention.document_cut.DocumentCut`. In each of ``axis.size``
    steps, a rank computes attention to the keys and values of one rank while it receives those for
    the next step. The partial results are summed as in
    :class:`~lightning_megatron.layers.context_parallel.ring.PartialSum`. The backward pass sends
    keys and values around the ring once more, followed by their gradients. Documents with a window
    all-gather keys and values instead, as :func:`gathered_attention` does, because the distances of
    queries and keys in a block differ by document.

    Equal to ``layers.attention.core.attend`` of the whole sequence, up to the order of sums.

    Communication: forward ``axis.size - 1`` exchanges with both neighbours, of keys and values;
        backward the same, and ``axis.size`` exchanges of their gradients in at least float32.
    Source: Liu et al. 2023 (ring attention); Brandon et al. 2023 (balanced causal work).
    """
    if span.cut is not None and span.window is not None:
        return gathered_attention(query, key, value, axis, span)
    blocks = ring_blocks(span, query.shape[0], axis.size, axis.rank, query.device)
    return _attend(query, torch.stack((key, value)), span, axis, blocks)


def gathered_attention(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    axis: MeshAxis,
    span: AttentionSpan,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention of this rank's queries to the gathered keys and values of all ranks.

    Equal to :func:`ring_attention`. It needs one message instead of several, and memory for the
    keys and values of the whole sequence, which suits few key/value heads.

    Communication: an all-gather of keys and values forward, a reduce-scatter of their gradients
        backward.
    """
    cut = span.cut or ContextCut(axis.size, axis.size * query.shape[0])
    joined = all_gather_sequence(torch.stack((key, value), dim=2), axis)
    key_value = in_sequence_order(joined, cut).movedim(2, 0)
    blocks = gathered_blocks(span, query.shape[0], axis.size, axis.rank, query.device)
    # The gathered keys are those of a ring of one rank.
    return _attend(query, key_value, span, MeshAxis(axis.name), [blocks])


def _attend(
    query: Tensor,
    key_value: Tensor,
    span: AttentionSpan,
    axis: MeshAxis,
    blocks: list[list[Block]],
) -> Tensor:
    mixed: Tensor = _Ring.apply(query, key_value, span.sinks, axis, blocks, span.results)
    return mixed.flatten(2)


class _Ring(torch.autograd.Function):
    """Attention to the keys and values of all ranks of a ring, one rank after the other.

    The backward pass uses the output and the log-sum-exps ``l_i`` over all keys, so the weights
    ``p_ij = exp(s_ij - l_i)`` are those of attention over all keys. Each block therefore yields
    exactly its share of the gradients::

        dv_j += sum_i p_ij do_i
        ds_ij = p_ij (do_i v_j - do_i o_i)
        dq_i += scale sum_j ds_ij k_j,  dk_j += scale sum_i ds_ij q_i
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_value: Tensor,
        sinks: Tensor | None,
        axis: MeshAxis,
        blocks: list[list[Block]],
        results: CoreResults | None,
    ) -> Tensor:
        compute = partial(_mixed, query, key_value, sinks, axis, blocks)
        out, log_sum = compute() if results is None else results.of(compute)
        ctx.save_for_backward(query, key_value, sinks, out, log_sum)
        ctx.axis = axis
        ctx.blocks = blocks
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key_value, sinks, out, log_sum = ctx.saved_tensors
        grad = grads[0].to(query.dtype)
        dtype = torch.promote_types(query.dtype, torch.float32)
        of_query = query.new_zeros(query.shape, dtype=dtype)
        arriving: Tensor | None = None
        pending = Pending()
        for source, keys, values in _blocks_of_ranks(key_value, ctx.axis):
            of_key_value = key_value.new_zeros(key_value.shape, dtype=dtype)
            for block in ctx.blocks[source]:
                rows = block.queries
                shares = backward_part(
                    taken(grad, rows),
                    (taken(query, rows), taken(keys, block.keys), taken(values, block.keys)),
                    (taken(out, rows), taken(log_sum.permute(2, 0, 1), rows).permute(1, 2, 0)),
                    block.span,
                    block.key_rows,
                )
                add_at(of_query, block.queries, shares[0])
                add_at(of_key_value[0], block.keys, shares[1])
                add_at(of_key_value[1], block.keys, shares[2])
            # The gradients that the previous ranks have accumulated for the same keys.
            pending.wait()
            if arriving is not None:
                of_key_value += arriving
            arriving, pending = _pass_on(of_key_value, ctx.axis)
        pending.wait()
        assert arriving is not None, "a ring has at least one rank"
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, log_sum, sinks)
        return of_query.to(query.dtype), arriving.to(key_value.dtype), of_sinks, None, None, None


def _mixed(
    query: Tensor,
    key_value: Tensor,
    sinks: Tensor | None,
    axis: MeshAxis,
    blocks: list[list[Block]],
) -> tuple[Tensor, Tensor]:
    """Return the output, in the dtype of the queries, and the log-sum-exps over all keys."""
    total = PartialSum(query)
    for source, keys, values in _blocks_of_ranks(key_value, axis):
        for block in blocks[source]:
            total.add(
                block.queries,
                *forward_part(
                    taken(query, block.queries),
                    taken(keys, block.keys),
                    taken(values, block.keys),
                    block.span,
                    block.key_rows,
                ),
            )
    out = total.out
    log_sum = total.log_sum
    if sinks is not None:
        out, log_sum = add_sinks(out, log_sum, sinks)
    return out.to(query.dtype), log_sum


def _blocks_of_ranks(key_value: Tensor, axis: MeshAxis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every rank's keys and values, this rank's first, while the next ones are received."""
    for step in range(axis.size):
        arriving = key_value
        pending = Pending()
        if step + 1 < axis.size:
            arriving, pending = _pass_on(key_value, axis)
        yield (axis.rank - step) % axis.size, key_value[0], key_value[1]
        pending.wait()
        key_value = arriving


def _pass_on(tensor: Tensor, axis: MeshAxis) -> tuple[Tensor, Pending]:
    """Start to send a tensor to the next rank, and to receive one from the previous rank."""
    if axis.size == 1:
        return tensor, Pending()
    sent = tensor.contiguous()
    arriving = torch.empty_like(sent)
    following = (axis.rank + 1) % axis.size
    previous = (axis.rank - 1) % axis.size
    return arriving, start_transfers([(sent, following)], [(arriving, previous)], axis)
