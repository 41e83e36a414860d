"""Attention of a layer over the ranks that share a sequence, or the tokens of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, all_to_all_rows
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.core import attend
from lightning_megatron.layers.attention.document_cut import DocumentCut, TokenOrder
from lightning_megatron.layers.attention.key_value_cache import HeldTokens
from lightning_megatron.layers.attention.operators import KeyRows
from lightning_megatron.layers.attention.parts import forward_by_operators
from lightning_megatron.layers.attention.span import AttentionSpan, add_sinks
from lightning_megatron.layers.context_parallel.blocks import hides_keys
from lightning_megatron.layers.context_parallel.ring import gathered_attention, ring_attention
from lightning_megatron.layers.context_parallel.sequence_order import (
    in_rank_order,
    in_sequence_order,
)
from lightning_megatron.layers.fused.dropout import WeightDropout
from lightning_megatron.plan.context import ContextCut, kv_heads_of, split_heads_over
from lightning_megatron.plan.context_transport import ContextChoice, ContextTransport
from lightning_megatron.shapes import Float, Int


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


#: Attention of some heads over the positions that a rank holds after the all-to-all.
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchanged_attention(
    query: Float[Tensor, "seq_part batch heads head_dim"],
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads head_dim"],
    axis: MeshAxis,
    core: Core,
    documents: DocumentCut | None = None,
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention with the heads divided among the ranks and all positions on each of them.

    An all-to-all gives each rank all positions of its share of the heads, and a second one returns
    the results. All ranks have the same number of heads if the number of ranks divides the heads;
    otherwise some ranks have one head more, and some may have none. Each rank receives the
    key/value heads that its query heads need, so several ranks may receive the same ones.

    Equal to ``core`` of the whole sequence, bit for bit if it computes heads independently.

    Args:
        core: Attention of some heads, called with ``(seq, batch, heads, head_dim)`` in the order
            of the sequence; its result is ``(seq, batch, heads * head_dim)``.
        documents: Cut of packed documents over the ranks; None means that rows are cut.

    Communication: two all-to-alls forward, two backward.
    Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
    """
    cut = documents or ContextCut(axis.size, axis.size * query.shape[0])
    heads = query.shape[2]
    kv_heads = key.shape[2]
    shares = split_heads_over(heads, axis.size)
    needed = [list(kv_heads_of(share, heads, kv_heads)) for share in shares]
    num_heads = len(shares[axis.rank])
    own_kv = len(needed[axis.rank])
    all_heads = [*query.unbind(2), *key.unbind(2), *value.unbind(2)]
    # One message carries the heads of queries, keys and values, sorted by destination.
    order: list[int] = []
    for share, kv in zip(shares, needed, strict=True):
        order += share
        order += [heads + head for head in kv]
        order += [heads + kv_heads + head for head in kv]
    rows = torch.stack([all_heads[head] for head in order])
    sends = [len(share) + 2 * len(kv) for share, kv in zip(shares, needed, strict=True)]
    received = all_to_all_rows(rows, sends, [num_heads + 2 * own_kv] * axis.size, axis)
    parts = (
        received.unflatten(0, (axis.size, num_heads + 2 * own_kv))
        .permute(0, 2, 3, 1, 4)
        .flatten(0, 1)
    )
    own_heads = in_sequence_order(parts, cut).split([num_heads, own_kv, own_kv], dim=2)
    # A rank without heads computes no attention, but its backward pass must communicate, too.
    mixed = (
        core(*own_heads).unflatten(-1, (num_heads, query.shape[3])) if num_heads else sum(own_heads)
    )
    parts = in_rank_order(mixed, cut).unflatten(0, (axis.size, query.shape[0]))
    rows = parts.permute(0, 3, 1, 2, 4).flatten(0, 1)
    back = all_to_all_rows(rows, [num_heads] * axis.size, [len(share) for share in shares], axis)
    return back.permute(1, 2, 0, 3).flatten(2)


def of_own_heads(span: AttentionSpan, heads: int, axis: MeshAxis) -> AttentionSpan:
    """Return the span for the heads that this rank computes during attention.

    Args:
        span: Span of all heads.
        heads: Query heads that are divided (heads).
        axis: Ranks that divide the heads.
    """
    share = split_heads_over(heads, axis.size)[axis.rank]
    if span.sinks is not None:
        span = replace(span, sinks=span.sinks[share.start : share.stop])
    if span.slopes is not None:
        span = replace(span, slopes=span.slopes.of(share))
    return span


def store_first(
    key: Float[Tensor, "seq_part batch kv_heads head_dim"],
    value: Float[Tensor, "seq_part batch kv_heads value_dim"],
    span: AttentionSpan,
    layer: int,
    axis: MeshAxis,
) -> None:
    """Store the keys and values of this rank's part of the first tokens of rows.

    The span has ``past``, whose cache is empty.
    """
    past = span.past
    assert past is not None, "the tokens have a cache"
    cache = past.cache
    if cache.held is None:
        places = _held_places(span.order, key.shape[0], axis, key.device)
        cache.held = HeldTokens(places, past.count, axis.size, axis.rank, cache.max_length)
    cache.held.cache.extend(layer, key, value, None)


def attend_to_held(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads value_dim"],
    span: AttentionSpan,
    layer: int,
    axis: MeshAxis,
) -> Float[Tensor, "seq batch heads*value_dim"]:
    """Store each new token on one rank, and compute attention of the new tokens to all tokens.

    All ranks have all new tokens, and the span of ``attention.cached_attention.cached_span``. Each
    rank computes attention to the tokens that it holds, and the results are merged exactly, as in
    :class:`~lightning_megatron.layers.context_parallel.ring.PartialSum`. No gradients flow to the
    keys of other ranks.

    Communication: an all-gather of the results of one part for each query.
    """
    past = span.past
    assert past is not None, "the tokens have a cache"
    held = past.cache.held
    assert held is not None, "the first tokens were stored on the ranks that share their rows"
    local = held.local_indices(past.cache.length, past.count)
    keys, values = held.cache.extend(layer, key[local], value[local], None)
    rows = KeyRows(keys.shape[2], places=past.key_places)
    keys = keys.permute(2, 0, 1, 3)
    values = values.permute(2, 0, 1, 3)
    out, log_sum = forward_by_operators(query, keys, values, replace(span, past=None), rows)
    part = torch.cat((out.to(log_sum.dtype), log_sum.permute(2, 0, 1)[..., None]), -1)
    outs, log_sums = all_gather_sequence(part[None], axis).split((out.shape[-1], 1), -1)
    total = log_sums.logsumexp(0)
    mixed = ((log_sums - total).exp() * outs).sum(0)
    if span.sinks is not None:
        mixed, _ = add_sinks(mixed, total[..., 0].permute(1, 2, 0), span.sinks)
    return mixed.to(query.dtype).flatten(2)


def _held_places(
    order: TokenOrder | None, seq_part: int, axis: MeshAxis, device: torch.device
) -> Int[Tensor, "#batch seq_part"]:
    if order is not None:
        return order.order[:, axis.rank]
    cut = ContextCut(axis.size, axis.size * seq_part)
    return torch.tensor(cut.positions(axis.rank), device=device)[None]
