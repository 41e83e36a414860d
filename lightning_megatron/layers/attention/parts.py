"""Attention of queries to a part of their keys, forward and backward, with log-sum-exps.

Attention over all keys is merged from such parts. For the scores ``s`` of a query with the keys of
part p, ``forward_part`` returns::

    lse_p = log sum exp s        out_p = sum exp(s - lse_p) v

Parts are merged exactly by ``lse = log sum_p exp lse_p`` and by
``out = sum_p exp(lse_p - lse) out_p``. ``backward_part`` takes the *merged* ``out`` and ``lse``.
Its weights ``exp(s - lse)`` and sums ``delta = sum(grad_out * out)`` therefore belong to the
softmax over all keys. Its results are the part's share of the gradient of the queries, and the
complete gradient of the part's keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.layers.attention.choose_core import Core, choose_part
from lightning_megatron.layers.attention.flash_kernels import (
    FlashCall,
    FlashKernel,
    attend_with_dropout,
    choose_flash,
)
from lightning_megatron.layers.attention.flex import flex_backward, flex_forward
from lightning_megatron.layers.attention.operators import (
    KeyRows,
    PartInputs,
    keys_of,
    masked_scores,
    raw_scores,
    repeated,
    scale_of,
)
from lightning_megatron.layers.attention.span import (
    AttentionSpan,
    Results,
    add_sinks,
    gradient_of_sinks,
)
from lightning_megatron.shapes import Float


def attend_by_parts(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads head_dim"],
    span: AttentionSpan,
) -> Float[Tensor, "seq batch heads head_dim"]:
    """Compute attention to the keys as one part and to the sinks, if there are any, as another."""
    mixed: Tensor = _Attention.apply(query, key, value, span.sinks, span)
    return mixed


def attend_to_documents(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "seq batch kv_heads head_dim"],
    value: Float[Tensor, "seq batch kv_heads head_dim"],
    span: AttentionSpan,
    dropout: float,
) -> Float[Tensor, "seq batch heads head_dim"]:
    """Compute attention over documents with dropped weights, by flash attention.

    Equal to :func:`attend_by_parts` whose weights are dropped, before they multiply the values. The
    span has documents, but neither soft cap nor sinks.
    """
    call = _flash_call(query, key, span, None)
    queries, keys, values = (_rows(tensor, True) for tensor in (query, key, value))
    out = attend_with_dropout(queries, keys, values, call, dropout)
    return out.unflatten(0, (query.shape[1], -1)).transpose(0, 1)


def forward_part(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    value: Float[Tensor, "_ batch kv_heads head_dim"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> Results:
    """Compute attention of queries to some keys, without autograd and without sinks.

    Queries and keys are aligned at the end of their document (of their row, without documents),
    unless ``keys.behind`` shifts them. A query without any visible key has the output 0 and the
    log-sum-exp minus infinity. The log-sum-exps are in float32 or wider.
    """
    core = core_of_part(query, span, keys)
    if core == "flash":
        return _flash_forward(query, key, value, span, keys)
    if core == "flex":
        return flex_forward(query, key, value, span, keys)
    return forward_by_operators(query, key, value, span, keys)


def forward_by_operators(
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "_ batch kv_heads head_dim"],
    value: Float[Tensor, "_ batch kv_heads value_dim"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> Results:
    """Compute :func:`forward_part` by operators of torch, with all scores in memory.

    The span may have a mask, and value heads may be smaller than those of queries and keys.
    """
    scores = masked_scores(query, key, span, keys)
    lse = scores.logsumexp(-1)
    weights = _weights(scores, lse).to(value.dtype)
    return torch.einsum("bhst,tbhd->sbhd", weights, repeated(value, query)), lse


def backward_part(
    grad_out: Float[Tensor, "seq batch heads head_dim"],
    inputs: PartInputs,
    result: Results,
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> PartInputs:
    """Compute the gradients of queries, keys and values of a part, as of :func:`forward_part`."""
    query, key, value = inputs
    core = core_of_part(query, span, keys)
    if core == "flash":
        return _flash_backward(grad_out, inputs, result, span, keys)
    if core == "flex":
        return flex_backward(grad_out, inputs, result, span, keys)
    out, lse = result
    weights = _weights(masked_scores(query, key, span, keys), lse)
    wide = weights.dtype
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1).permute(1, 2, 0)[..., None]
    grad_weights = torch.einsum("sbhd,tbhd->bhst", grad_out, repeated(value, query)).to(wide)
    grad_scores = weights * (grad_weights - delta)
    if span.soft_cap is not None:
        bounded = (raw_scores(query, key, span) / span.soft_cap).tanh()
        grad_scores = grad_scores * (1 - bounded.square())
    grad_scores = (grad_scores * scale_of(span, query)).to(query.dtype)
    grad_query = torch.einsum("bhst,tbhd->sbhd", grad_scores, repeated(key, query))
    grad_key = torch.einsum("bhst,sbhd->tbhd", grad_scores, query)
    grad_value = torch.einsum("bhst,sbhd->tbhd", weights.to(query.dtype), grad_out)
    return grad_query, _summed(grad_key, key), _summed(grad_value, value)


def core_of_part(
    query: Float[Tensor, "seq batch heads head_dim"],
    span: AttentionSpan,
    keys: KeyRows | None = None,
) -> Core:
    """Return the kernel that computes a part; only ``operators`` stores all scores."""
    behind = 0 if keys is None else keys.behind
    head_dim = query.shape[-1]
    return choose_part(query.device, query.dtype, span, behind=behind, head_dim=head_dim).core


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    # A query without visible keys has the lse minus infinity, and its weights are 0.
    return (scores - lse[..., None].masked_fill(lse[..., None] == -torch.inf, 0.0)).exp()


def _summed(gradient: Tensor, shared: Tensor) -> Tensor:
    """Sum the gradients of the copies of a key or value head."""
    return gradient.unflatten(2, (shared.shape[2], -1)).sum(3)


def _rows(tensor: Tensor, has_documents: bool) -> Tensor:
    """Return ``(S, B, H, D)`` as ``(B, S, H, D)``, or as tokens of one row after the other."""
    rows = tensor.transpose(0, 1)
    return rows.flatten(0, 1) if has_documents else rows


def _flash_call(query: Tensor, key: Tensor, span: AttentionSpan, keys: KeyRows | None) -> FlashCall:
    length = key.shape[0]
    keys = keys or keys_of(span, length) or KeyRows(length, span.borders, span.longest)
    bounds = [
        min(longest or length, length)
        for longest, length in ((span.longest, query.shape[0]), (keys.longest, keys.seq_length))
    ]
    left = right = -1
    if span.window is not None:
        left = span.window - 1 - keys.behind
        right = span.window - 1 + keys.behind
    if span.causal:
        right = keys.behind
    is_plainly_causal = span.causal and span.window is None and not keys.behind
    return FlashCall(
        span.borders,
        keys.borders,
        bounds[0],
        bounds[1],
        is_plainly_causal,
        left,
        right,
        scale_of(span, query),
        span.soft_cap or 0.0,
    )


def _kernel_of(query: Tensor, key: Tensor, call: FlashCall) -> FlashKernel:
    plain = call.is_plain(query.shape[0], key.shape[0])
    return choose_flash(query.device, query.shape[-1], plain).kernel


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, span: AttentionSpan, keys: KeyRows | None
) -> Results:
    length, num_sequences = query.shape[:2]
    call = _flash_call(query, key, span, keys)
    packed = span.borders is not None
    kernel = _kernel_of(query, key, call)
    queries, key_rows, values = (_rows(tensor, packed) for tensor in (query, key, value))
    out, lse = kernel.forward(queries, key_rows, values, call)
    if packed:
        out = out.view(num_sequences, length, *out.shape[1:])
        lse = lse.view(-1, num_sequences, length).transpose(0, 1)
    if keys is not None:
        # Torch's kernel gives queries without keys the log-sum-exp plus infinity.
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return out.transpose(0, 1), lse


def _flash_backward(
    grad_out: Tensor, inputs: PartInputs, result: Results, span: AttentionSpan, keys: KeyRows | None
) -> PartInputs:
    query, key, _ = inputs
    out, lse = result
    packed = span.borders is not None
    call = _flash_call(query, key, span, keys)
    kernel = _kernel_of(query, key, call)
    grad_rows, queries, key_rows, values, out_rows = (
        _rows(tensor, packed) for tensor in (grad_out, *inputs, out)
    )
    sums = (lse.transpose(0, 1).flatten(1) if packed else lse).contiguous()
    gradients = kernel.backward(grad_rows, (queries, key_rows, values), (out_rows, sums), call)
    pairs = zip(gradients, inputs, strict=True)
    unpacked = [
        (gradient.unflatten(0, (like.shape[1], -1)) if packed else gradient).transpose(0, 1)
        for gradient, like in pairs
    ]
    return unpacked[0], unpacked[1], unpacked[2]


class _Attention(torch.autograd.Function):
    """Attention to one part and to the sinks, differentiable; see the module's formulas."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, span: Any
    ) -> Tensor:
        def compute() -> Results:
            out, lse = forward_part(query, key, value, span)
            return (out, lse) if sinks is None else add_sinks(out, lse, sinks)

        out, lse = compute() if span.results is None else span.results.of(compute)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.span = span
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        (grad_out,) = grads
        gradients = backward_part(grad_out, (query, key, value), (out, lse), ctx.span)
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            grad_sinks = gradient_of_sinks(grad_out, out, lse, sinks)
        return (*gradients, grad_sinks, None)
