"""The attention core: ``attend(query, key, value, span)``, softmax(Q K^T / sqrt(K)) V.

``layers.attention.parts`` computes it in parts, forward and backward with log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from lightning_megatron.layers.attention.choose_core import CoreChoice, choose_core
from lightning_megatron.layers.attention.flex import attend_by_flex
from lightning_megatron.layers.attention.operators import (
    DropWeights,
    added_mask,
    attend_by_operators,
    is_plain,
    places_of_visible,
    repeated,
)
from lightning_megatron.layers.attention.parts import attend_by_parts, attend_to_documents
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.shapes import Float


def attend(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads value_dim"],
    span: AttentionSpan,
    *,
    dropout: float = 0.0,
    drop: DropWeights = F.dropout,
) -> Float[Tensor, "seq batch heads*value_dim"]:
    """Compute scaled dot-product attention over a span.

    Equal to torch.nn.functional.scaled_dot_product_attention with key/value heads repeated for
    every query head and with the span as a mask. ``drop`` is used where no kernel of torch drops
    weights.
    """
    length, num_sequences, _, head_dim = query.shape
    span = span.laid_out(num_sequences, length, query.device)
    if span.results is not None:
        return with_wide_values(partial(_attend_once, span), query, key, value)
    choice = choose_core(
        query.device,
        query.dtype,
        span,
        length,
        dropout=dropout,
        head_dim=head_dim,
        value_dim=value.shape[-1],
    )

    def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if choice.core == "flash" and dropout > 0.0:
            mixed = attend_to_documents(query, key, value, span, dropout)
        elif choice.core == "flash":
            mixed = attend_by_parts(query, key, value, span)
        elif choice.core == "flex":
            mixed = attend_by_flex(query, key, value, span)
        elif choice.core == "operators":
            mixed = attend_by_operators(query, key, value, span, dropout, drop=drop)
        else:
            mixed = _attend_by_torch(query, key, value, span, dropout, choice)
        return mixed.flatten(2)

    if choice.pads_values:
        return with_wide_values(core, query, key, value)
    return core(query, key, value)


def _attend_once(span: AttentionSpan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_by_parts(query, key, value, span).flatten(2)


def with_wide_values(
    core: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads value_dim"],
) -> Float[Tensor, "seq batch heads*value_dim"]:
    """Compute attention by a core that needs value heads of the size of query and key heads.

    Equal to ``core(query, key, value)`` of a core that takes smaller values: these are padded with
    zeros, and the outputs of the padding are removed. The result of the core has the heads
    flattened.
    """
    head_dim = query.shape[-1]
    value_dim = value.shape[-1]
    if value_dim == head_dim:
        return core(query, key, value)
    wide = core(query, key, F.pad(value, (0, head_dim - value_dim)))
    return wide.unflatten(-1, (-1, head_dim))[..., :value_dim].flatten(2)


def prepared(
    span: AttentionSpan | None,
    num_sequences: int,
    seq_length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    dropout: float = 0.0,
    head_dim: int = 128,
) -> AttentionSpan | None:
    """Return a span in the form that the chosen kernel takes, for layers that share it.

    These layers then need not compute the borders of documents or a dense mask again. The host
    reads no value from the device. The result is None for whole rows without documents, prefix,
    mask or window.
    """
    if span is None or is_plain(span, seq_length):
        return None
    span = replace(span.laid_out(num_sequences, seq_length, device), positions=None)
    choice = choose_core(device, dtype, span, seq_length, dropout=dropout, head_dim=head_dim)
    if not choice.needs_mask:
        return span
    mask = added_mask(span, num_sequences, seq_length, dtype=dtype, device=device)
    return AttentionSpan(mask=mask, places=places_of_visible(span))


def _attend_by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: AttentionSpan,
    dropout: float,
    choice: CoreChoice,
) -> Tensor:
    length, num_sequences = query.shape[:2]
    mask = None
    if choice.needs_mask:
        mask = added_mask(span, num_sequences, length, dtype=query.dtype, device=query.device)
    if choice.expand_kv:
        key = repeated(key, query)
        value = repeated(value, query)
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    context: AbstractContextManager[object] = nullcontext()
    if choice.backends:
        context = sdpa_kernel(list(choice.backends), set_priority=True)
    with context:
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=span.causal and mask is None,
            scale=span.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return mixed.permute(2, 0, 1, 3)
