"""Inputs of one call of a GPT, and what its layers share: rotary tables and attention spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.cached_attention import cached_span
from lightning_megatron.layers.attention.core import prepared
from lightning_megatron.layers.attention.document_cut import TokenOrder
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.attend_across import cut_documents
from lightning_megatron.layers.linear.regions import dtype_of_products
from lightning_megatron.layers.rotary import RotaryTables
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt_block import rotary_name, span_of_layer
from lightning_megatron.models.gpt_losses import Targets
from lightning_megatron.models.layered import LayerInputs
from lightning_megatron.plan.context_transport import ContextChoice
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class GPTCall:
    """Inputs of one call of a GPT, which are the same on all stages.

    Args:
        tokens: Token ids; None if vectors, which replace their embeddings, are given.
        positions: Position of each token in its row; None counts along the row.
        order: Positions of the rows that each rank of cp holds; None means equal parts.
        targets: Labels and settings of the loss; None means that the call returns logits.
        place: Index of the only position whose logits are returned; None means all positions.
        continues: Whether the rows have a cache of earlier tokens, so that the shapes differ in
            each call.
    """

    tokens: Int[Tensor, "batch seq"] | None
    vectors: Float[Tensor, "batch seq hidden"] | None
    positions: Int[Tensor, "batch seq"] | None
    order: TokenOrder | None
    targets: Targets | None
    place: int | None
    continues: bool


def continues_cache(span: AttentionSpan | None) -> bool:
    """Return whether rows continue the tokens of a cache, so that cp does not divide them."""
    return span is not None and span.past is not None and span.past.cache.length > 0


def laid_out(
    span: AttentionSpan | None,
    inputs: Shaped[Tensor, "batch seq ..."],
    mesh: ParallelMesh,
    choice: ContextChoice,
) -> AttentionSpan | None:
    """Return a span with document borders and positions, and over cp with the order of tokens."""
    if span is None:
        return None
    num_sequences, length = inputs.shape[:2]
    span.check_shape(num_sequences, length)
    if mesh.cp.size == 1:
        return span.laid_out(num_sequences, length, inputs.device)
    if continues_cache(span):
        # All ranks compute each new token, and one of them stores its keys and values.
        order = TokenOrder.uncut(num_sequences, length, inputs.device)
        return replace(span, order=order)
    span = span.laid_out(num_sequences, length, inputs.device)
    return cut_documents(span, num_sequences, length, mesh, choice)


def layer_inputs(
    config: GPTConfig,
    layers: Sequence[int],
    rotary: Mapping[str, RotaryTables],
    mesh: ParallelMesh,
    like: Float[Tensor, "..."],
    shape: torch.Size,
    span: AttentionSpan | None,
    *,
    dropout: float,
) -> dict[int, LayerInputs]:
    """Return the rotary tables and attention spans of layers, by their index in the whole model.

    Layers with the same angles share tables, and layers with the same window share a span.

    Args:
        like: Tensor with the dtype and on the device of the residual stream.
        shape: Number of rows, and their length (tokens).
        span: Documents, padding and positions of the rows, as :func:`laid_out` returns them;
            None means rows without these.
    """
    rows = span or AttentionSpan()
    angles: dict[str, Any] = {}
    spans: dict[str, AttentionSpan | None] = {}
    kinds: dict[tuple[str, str], LayerInputs] = {}
    inputs: dict[int, LayerInputs] = {}
    for index in layers:
        rotary_key = rotary_name(config, index)
        span_key = span_name(config, index)
        if rotary_key not in angles:
            tables = rotary.get(rotary_key)
            angles[rotary_key] = (
                None if tables is None else tables(shape[1], like, rows.positions, rows.order)
            )
        if span_key not in spans:
            layer_span = span_of_layer(config, index)
            spans[span_key] = _shared_span(
                layer_span, like, shape, span, dropout, config.head_size, mesh
            )
        kind = (rotary_key, span_key)
        inputs[index] = kinds.setdefault(kind, LayerInputs(angles[rotary_key], spans[span_key]))
    return inputs


def _is_plain_part(span: AttentionSpan) -> bool:
    """Return whether a span has only whole rows without masks, which cp divides into parts."""
    describes_rows = span.has_documents or span.mask is not None or span.prefix is not None
    return not (describes_rows or continues_cache(span))


def span_name(config: GPTConfig, index: int) -> str:
    """Return the name of the attention span of a block."""
    window = config.window_of(index)
    return "span" if window is None else f"span.{window}"


def _shared_span(
    layer_span: AttentionSpan,
    like: Tensor,
    shape: torch.Size,
    span: AttentionSpan | None,
    dropout: float,
    head_dim: int,
    mesh: ParallelMesh,
) -> AttentionSpan | None:
    """Return the attention span for all layers with the same kind of attention."""
    options: dict[str, Any] = {"dtype": dtype_of_products(like), "device": like.device}
    past = None if span is None else span.past
    if mesh.cp.size > 1 and (span is None or _is_plain_part(span)):
        # The ranks of cp have parts of rows, and need no mask of whole rows.
        return None if past is None else AttentionSpan(past=past)
    if span is not None and span.cut is not None:
        return replace(span, positions=None)
    if span is not None and past is not None and past.cache.length > 0:
        return cached_span(layer_span, span, shape[1], **options)
    whole = prepared(layer_span.over(span), *shape, **options, dropout=dropout, head_dim=head_dim)
    return whole if past is None else replace(whole or AttentionSpan(), past=past)
