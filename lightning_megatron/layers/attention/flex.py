"""The attention core by FlexAttention, a kernel that torch generates for the span."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from lightning_megatron.layers.attention.dense_mask import KeyRows, keys_of
from lightning_megatron.layers.attention.score_terms import add_sinks
from lightning_megatron.layers.attention.span import AttentionSpan
from lightning_megatron.layers.attention.visible_blocks import visible_blocks
from lightning_megatron.shapes import Float

#: Number of kernels that a process may compile, for different spans, dtypes and shapes of batches.
_NUM_KERNELS = 128


def attend_by_flex(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads head_dim"],
    span: AttentionSpan,
) -> Float[Tensor, "seq batch heads head_dim"]:
    """Compute attention without the scores of all pairs of tokens in memory.

    Equal to ``attend_by_operators`` without dropout, for spans without a mask. The first call for a
    span of another kind compiles a kernel, which takes seconds.
    """
    if span.sinks is None:
        mixed: Tensor = _called(query, key, value, span).permute(2, 0, 1, 3)
        return mixed
    return add_sinks(*flex_forward(query, key, value, span), span.sinks)[0]


def flex_forward(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    value: Float[Tensor, "_ batch kv_heads head_dim"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> tuple[Float[Tensor, "seq batch heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """Compute attention to a part of the keys and its log-sum-exps, differentiably.

    Equal to ``attention.parts.forward_part``; sinks are ignored.
    """
    out, aux = _called(query, key, value, span, keys, return_aux=AuxRequest(lse=True))
    return out.permute(2, 0, 1, 3), aux.lse


def flex_backward(
    grad_out: Float[Tensor, "seq batch heads head_dim"],
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    value: Float[Tensor, "_ batch kv_heads head_dim"],
    out: Float[Tensor, "seq batch heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> tuple[
    Float[Tensor, "seq batch heads head_dim"],
    Float[Tensor, "_ batch kv_heads head_dim"],
    Float[Tensor, "_ batch kv_heads head_dim"],
]:
    """Compute the gradients of queries, keys and values of a part from the merged results.

    The kernel's backward pass takes gradients of a part's own output ``o_p`` and log-sum-exps
    ``l_p``, not the merged ``o`` and ``l``. With ``l = log sum_p exp l_p`` and
    ``o = sum_p exp(l_p - l) o_p``, and with the gradient ``do`` of ``o``, these are::

        do_p = exp(l_p - l) do        dl_p = exp(l_p - l) sum(do (o_p - o))

    The part computes ``o_p`` and ``l_p`` again, because keeping them for each part would take the
    memory of the outputs of whole rows. Sinks are a part that ``o`` and ``l`` include.

    Equal to ``attention.parts.backward_part``.
    """
    query, key, value = inputs = tuple(
        tensor.detach().requires_grad_() for tensor in (query, key, value)
    )
    with torch.enable_grad():
        part, part_lse = flex_forward(query, key, value, span, keys)
    # Both log-sum-exps may be minus infinity, for queries without visible keys.
    share = (part_lse.detach() - lse).exp().masked_fill(part_lse == -torch.inf, 0.0)
    wide = grad_out.to(share.dtype)
    grad_part = wide * share.permute(2, 0, 1)[..., None]
    lean = (wide * (part.detach().to(share.dtype) - out.to(share.dtype))).sum(-1)
    gradients = grad_part.to(part.dtype), share * lean.permute(1, 2, 0)
    input_gradients = torch.autograd.grad((part, part_lse), inputs, gradients)
    return input_gradients[0], input_gradients[1], input_gradients[2]


def _called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    span: AttentionSpan,
    keys: KeyRows | None = None,
    **kernel_options: Any,
) -> Any:
    length, num_sequences = query.shape[:2]
    keys = keys or keys_of(span, length)
    options: dict[str, Any] = {
        "score_mod": _of_scores(span, query, keys),
        "block_mask": visible_blocks(span, num_sequences, length, query.device, keys),
        "scale": span.scale,
        "enable_gqa": query.shape[2] != key.shape[2],
    }
    if query.is_cuda:
        # Below 128 queries torch would take its kernel for few queries, which does not support
        # these blocks.
        options["kernel_options"] = {"BACKEND": "TRITON"}
    rows = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    return _compiled()(*rows, **options, **kernel_options)


def _of_scores(
    span: AttentionSpan, query: Tensor, keys: KeyRows | None
) -> Callable[..., Tensor] | None:
    """Return the function of scaled scores that the kernel inlines; None if they do not change."""
    soft_cap = span.soft_cap
    slopes = places = None
    if span.slopes is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        slopes = span.slopes.on(query.device).to(wide)
        places = _places(span, query, keys)
    if soft_cap is None and slopes is None:
        return None

    def changed(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if slopes is not None:
            distance = query - key
            if places is not None:
                distance = places[0][row, query] - places[1][row, key]
            score = score - slopes[head] * distance.abs()
        return score

    return changed


def _places(
    span: AttentionSpan, query: Tensor, keys: KeyRows | None
) -> tuple[Tensor, Tensor] | None:
    """Return the places of queries and keys in every row; None if places are their indices."""
    query_places = span.places
    key_places = query_places if keys is None else keys.places
    if query_places is None or key_places is None:
        return None
    num_sequences = query.shape[1]
    return (
        query_places.expand(num_sequences, -1).contiguous(),
        key_places.expand(num_sequences, -1).contiguous(),
    )


@cache
def _compiled() -> Callable[..., Any]:
    # Without fullgraph, torch would silently fall back to operators.
    return _by_kinds(torch.compile(flex_attention, fullgraph=True))


def _by_kinds(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a kernel of its own for each kind of attention."""
    # Another soft cap would become a symbol, which torch 2.15 cannot inline into the kernel.
    kinds = torch._dynamo.config.patch(recompile_limit=_NUM_KERNELS, specialize_float=True)
    return cast(Callable[..., Any], kinds(attend))
