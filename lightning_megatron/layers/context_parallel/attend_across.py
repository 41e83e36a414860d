"""Attention of a layer over the ranks that share a sequence, by the chosen transport."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.document_cut import DocumentCut
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.blocks import hides_keys
from lightning_megatron.layers.context_parallel.head_exchange import (
    exchanged_attention,
    of_own_heads,
)
from lightning_megatron.layers.context_parallel.ring import gathered_attention, ring_attention
from lightning_megatron.layers.fused.dropout import WeightDropout
from lightning_megatron.plan.context import split_heads_over
from lightning_megatron.plan.context_transport import ContextChoice, ContextTransport
from lightning_megatron.shapes import Float


def attend_across(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    span: AttentionSpan,
    mesh: ParallelMesh,
    choice: ContextChoice,
    *,
    dropout: float = 0.0,
    drop: WeightDropout | None = None,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention over sequences that the ranks of cp share.

    Equal to :func:`~lightning_megatron.layers.attention.core.attend` of the whole sequences, which
    the span describes. Where torch's kernels drop no weights, ``drop`` does; None draws at random.

    Communication: that of the transport, over cp.
    """
    transport = transport_of(span, mesh, choice)
    axis = mesh.cp
    if span.mask is not None and transport != "all_to_all":
        span = replace(span, mask=span.mask.expand(query.shape[1], -1, -1, -1))
    if transport == "all_to_all":
        whole = replace(of_own_heads(span, query.shape[2], axis), cut=None)
        share = split_heads_over(query.shape[2], axis.size)[axis.rank]
        own = F.dropout if drop is None else drop.from_head(share.start)

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, whole, dropout=dropout, drop=own)

        return exchanged_attention(query, key, value, axis, core, span.cut)
    by_axis = ring_attention if transport == "ring" else gathered_attention
    return by_axis(query, key, value, axis, span)


def cut_documents(
    span: AttentionSpan,
    num_sequences: int,
    seq_length: int,
    mesh: ParallelMesh,
    choice: ContextChoice,
) -> AttentionSpan:
    """Return a laid out span with the cut of its documents, if layers compute attention in parts.

    The positions of all tokens are then given, because the tokens of a rank are not adjacent.
    Without documents, or if all ranks divide the heads during attention, whole rows are cut.
    """
    if span.borders is None or span.cut is not None or choice.transport == "all_to_all":
        return span
    positions = span.positions
    if positions is None:
        index = torch.arange(seq_length, device=span.borders.device)
        positions = index.expand(num_sequences, -1)
    cut = DocumentCut.of(
        span.borders, num_sequences, seq_length, mesh.cp.size, mesh.cp.rank, longest=span.longest
    )
    return replace(span, positions=positions, cut=cut, order=cut)


def transport_of(
    span: AttentionSpan, mesh: ParallelMesh, choice: ContextChoice
) -> ContextTransport:
    """Return the transport of a layer over a span, which may need whole rows.

    Raises:
        UnsupportedError: If the user chose a transport that computes in parts, and the span has a
            mask of pairs, a prefix, documents of keys or a window to both sides.
    """
    if choice.transport == "all_to_all":
        return "all_to_all"
    # The parts omit keys after the queries. A prefix, a window to both sides, and a mask of pairs
    # may need them. A part has no documents of keys of its own.
    needs_rows = span.mask is not None and not hides_keys(span)
    needs_rows |= span.prefix is not None
    needs_rows |= span.window is not None and not span.causal
    needs_rows |= span.key_borders is not None
    if mesh.context.transport == "auto":
        # With a window a rank needs few keys, and kernels for whole rows skip all others.
        return "all_to_all" if needs_rows or span.window is not None else choice.transport
    if needs_rows:
        raise UnsupportedError(
            f"context.transport {choice.transport!r} cannot be used with a mask of padding between "
            "tokens, a prefix, documents of keys, or a window to both sides, because each rank has "
            "only a part of every row. Use 'all_to_all' or 'auto', or describe padding by the "
            "lengths of documents."
        )
    return choice.transport
