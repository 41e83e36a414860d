"""Attention of a layer over the ranks that share a sequence, by the chosen transport."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention_core import attend
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.context_parallel.head_exchange import (
    exchanged_attention,
    hierarchical_attention,
)
from lightning_megatron.layers.context_parallel.ring import gathered_attention, ring_attention
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
) -> Float[Tensor, "seq_part batch heads*head_dim"]:
    """Compute attention over sequences that the ranks of cp share.

    Equal to :func:`~lightning_megatron.layers.attention_core.attend` of the whole sequences.

    Args:
        query: Queries of this rank's pieces.
        key: Keys of this rank's pieces.
        value: Values of this rank's pieces.
        span: Description of who attends to whom in whole sequences.
        mesh: Process groups of this rank.
        choice: Transport of the layer.
        dropout: Probability that an attention weight is dropped; 0 outside training.

    Raises:
        UnsupportedError: If a transport that computes in parts was asked for and the span has more
            than a window.

    Communication: that of the transport, over cp.
    """
    transport = _transport_of(span, mesh, choice)
    if transport == "all_to_all":
        share = split_heads_over(query.shape[2], mesh.cp.size)[mesh.cp.rank]
        if span.sinks is not None:
            span = replace(span, sinks=span.sinks[share.start : share.stop])

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, span, dropout=dropout)

        return exchanged_attention(query, key, value, mesh.cp, core)
    kind: dict[str, Any] = {name: getattr(span, name) for name in ("causal", "window", "scale")}
    if transport == "hierarchical":
        return hierarchical_attention(query, key, value, mesh.cp_inner, mesh.cp_outer, **kind)
    by_axis = ring_attention if transport == "ring" else gathered_attention
    return by_axis(query, key, value, mesh.cp, **kind)


def _transport_of(
    span: AttentionSpan, mesh: ParallelMesh, choice: ContextChoice
) -> ContextTransport:
    if choice.transport == "all_to_all":
        return "all_to_all"
    parts = (span.mask, span.prefix, span.lengths, span.borders, span.soft_cap, span.sinks)
    needs_rows = any(part is not None for part in parts)
    # Windows without causality reach to both sides, which the plans of parts do not know.
    needs_rows |= span.window is not None and not span.causal
    if mesh.context.transport == "auto":
        # Kernels for whole rows take windows; parts of windows would need masks.
        return "all_to_all" if needs_rows or span.window is not None else choice.transport
    if needs_rows:
        raise UnsupportedError(
            f"cp_transport {choice.transport!r} cannot be used with padding, packed documents, "
            "soft caps or sinks, because its ranks see only parts of the rows. Use 'all_to_all' or "
            "'auto'."
        )
    return choice.transport
