"""The attention core by FlexAttention, a kernel that torch generates for the span."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from lightning_megatron.layers.attention_sinks import add_sinks
from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.visible_blocks import visible_blocks
from lightning_megatron.shapes import Float

#: Kernels that may be compiled in a process, for kinds of spans, dtypes and forms of batches.
_NUM_KERNELS = 128


def attend_by_flex(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads head_dim"],
    span: AttentionSpan,
) -> Float[Tensor, "seq batch heads head_dim"]:
    """Compute attention without the scores of all pairs of tokens in memory.

    Equal to ``attend_by_operators`` without dropout. The first call for a span of another kind
    compiles a kernel, which takes seconds.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        span: Description of the attention, laid out or without documents, and without a mask.
    """
    length, num_sequences = query.shape[:2]
    blocks = visible_blocks(span, num_sequences, length, query.device)
    rows = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    options = {
        "score_mod": _of_scores(span, query),
        "block_mask": blocks,
        "scale": span.scale,
        "enable_gqa": query.shape[2] != key.shape[2],
    }
    if span.sinks is None:
        return _compiled()(*rows, **options).permute(2, 0, 1, 3)
    out, aux = _compiled()(*rows, **options, return_aux=AuxRequest(lse=True))
    return add_sinks(out.permute(2, 0, 1, 3), aux.lse, span.sinks)[0]


def _of_scores(span: AttentionSpan, like: Tensor) -> Callable[..., Tensor] | None:
    """Return what becomes of a scaled score, which a kernel inlines; None if it stays."""
    soft_cap = span.soft_cap
    slopes = None
    if span.slopes is not None:
        wide = torch.promote_types(like.dtype, torch.float32)
        slopes = span.slopes.on(like.device).to(wide)
    if soft_cap is None and slopes is None:
        return None

    def changed(score: Tensor, _row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if slopes is not None:
            score = score - slopes[head] * (query - key).abs()
        return score

    return changed


@cache
def _compiled() -> Callable[..., Any]:
    # Without the whole function in one graph torch would fall back to operators, silently.
    compiled = torch.compile(flex_attention, fullgraph=True)
    allow_kinds = torch._dynamo.config.patch(recompile_limit=_NUM_KERNELS)
    return cast(Callable[..., Any], allow_kinds(compiled))
