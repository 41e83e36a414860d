"""Inputs that the layers of a GPT share: rotary tables and attention spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.attention.cached_attention import cached_span
from lightning_megatron.layers.attention.core import prepared
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.context_parallel.cached_parts import held_span
from lightning_megatron.layers.linear.regions import dtype_of_products
from lightning_megatron.layers.rotary import RotaryTables
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.gpt_block import rotary_name, span_of_layer
from lightning_megatron.models.layered import LayerInputs
from lightning_megatron.shapes import Float


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
        span: Documents, padding and positions of the rows, as ``gpt_inputs.laid_out`` returns them;
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
    is_continued = span.past is not None and span.past.cache.length > 0
    return not (describes_rows or is_continued)


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
        make_span = cached_span if past.cache.held is None else held_span
        return make_span(layer_span, span, shape[1], **options)
    whole = prepared(layer_span.over(span), *shape, **options, dropout=dropout, head_dim=head_dim)
    return whole if past is None else replace(whole or AttentionSpan(), past=past)
