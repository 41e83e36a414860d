"""Attention of some queries to some keys, and the exact sum of such partial results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_megatron.layers.attention_span import AttentionSpan
from lightning_megatron.layers.choose_core import obstacle_to_flash
from lightning_megatron.plan.context import AttentionBlock
from lightning_megatron.shapes import Bool, Float

_aten = torch.ops.aten


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are added: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class PartialSum:
    """Sum of the partial results of attention over disjoint sets of keys.

    Let ``s_ij`` be the scaled score of query ``i`` and key ``j``. Attention over a set ``A`` of
    keys is ``o_A = sum_j exp(s_ij - l_A) v_j`` with ``l_A = log sum_j exp(s_ij)``. For disjoint
    sets ``A`` and ``B``::

        l = log(exp(l_A) + exp(l_B))
        o = exp(l_A - l) o_A + exp(l_B - l) o_B

    is attention over their union, exactly. A query without keys has ``l = -inf`` and ``o = 0``. The
    sums are in float32 for half types, and in the dtype of the queries otherwise.

    Args:
        query: Queries of the whole sum.
    """

    def __init__(self, query: Float[Tensor, "seq batch heads head_dim"]) -> None:
        seq, batch, heads, head_dim = query.shape
        dtype = dtype_of_sums(query.dtype)
        self.out = query.new_zeros((batch, heads, seq, head_dim), dtype=dtype)
        self.log_sum = query.new_full((batch, heads, seq), -torch.inf, dtype=dtype)

    def add(
        self,
        rows: range,
        out: Float[Tensor, "batch heads rows head_dim"],
        log_sum: Float[Tensor, "batch heads rows"],
    ) -> None:
        """Add the attention of some queries to keys that are new to them.

        Args:
            rows: Rows of the queries.
            out: Partial attention.
            log_sum: Logarithm of the sum of the exponentiated scores.
        """
        at = slice(rows.start, rows.stop)
        before = self.log_sum[:, :, at]
        log_sum = log_sum.to(before.dtype)
        total = torch.logaddexp(before, log_sum)
        # Where no key was seen yet, -inf - -inf would be no number.
        shift = total.masked_fill(total.isneginf(), 0.0)
        old = (before - shift).exp().unsqueeze(-1)
        new = (log_sum - shift).exp().unsqueeze(-1)
        self.out[:, :, at] = old * self.out[:, :, at] + new * out
        self.log_sum[:, :, at] = total


def add_blocks(
    total: PartialSum,
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "keys batch kv_heads head_dim"],
    value: Float[Tensor, "keys batch kv_heads head_dim"],
    blocks: Sequence[AttentionBlock],
    scale: float,
) -> None:
    """Add the attention of some blocks of queries and keys to a sum.

    Args:
        total: Sum of the partial results.
        query: Queries of the sum.
        key: Keys, of which the blocks name rows.
        value: Values of the keys.
        blocks: Rows of queries and keys that see each other.
        scale: Factor of the scores.
    """
    for block in blocks:
        parts = _rows(query, block.queries), _rows(key, block.keys), _rows(value, block.keys)
        run = _attend_by_flash if _is_for_flash(query, block) else _attend_by_products
        total.add(block.queries, *run(*parts, block, scale))


def add_gradients(
    grads: tuple[
        Float[Tensor, "seq batch heads head_dim"],
        Float[Tensor, "keys batch kv_heads head_dim"],
        Float[Tensor, "keys batch kv_heads head_dim"],
    ],
    grad: Float[Tensor, "batch heads seq head_dim"],
    query: Float[Tensor, "seq batch heads head_dim"],
    key: Float[Tensor, "keys batch kv_heads head_dim"],
    value: Float[Tensor, "keys batch kv_heads head_dim"],
    out: Float[Tensor, "batch heads seq head_dim"],
    log_sum: Float[Tensor, "batch heads seq"],
    blocks: Sequence[AttentionBlock],
    scale: float,
) -> None:
    """Add the gradients of queries, keys and values through some blocks.

    With the output and the logarithms of the whole sum, the weights ``p_ij = exp(s_ij - l_i)`` are
    those of attention over all keys. The gradient through a block is therefore exactly its share::

        dv_j += sum_i p_ij do_i
        ds_ij = p_ij (do_i v_j - do_i o_i)
        dq_i += scale sum_j ds_ij k_j,  dk_j += scale sum_i ds_ij q_i

    Args:
        grads: Gradients of queries, keys and values, which are added to.
        grad: Gradient of the output.
        query: Queries.
        key: Keys, of which the blocks name rows.
        value: Values of the keys.
        out: Output of the whole sum.
        log_sum: Logarithms of the whole sum.
        blocks: Rows of queries and keys that see each other.
        scale: Factor of the scores.
    """
    for block in blocks:
        at = slice(block.queries.start, block.queries.stop)
        parts = _rows(query, block.queries), _rows(key, block.keys), _rows(value, block.keys)
        run = _gradients_by_flash if _is_for_flash(query, block) else _gradients_by_products
        found = run(grad[:, :, at], *parts, out[:, :, at], log_sum[:, :, at], block, scale)
        rows = block.queries, block.keys, block.keys
        for whole, share, where in zip(grads, found, rows, strict=True):
            _rows(whole, where).add_(share.permute(2, 0, 1, 3))


def _rows(tensor: Tensor, rows: range) -> Tensor:
    return tensor[rows.start : rows.stop]


def _is_for_flash(query: Tensor, block: AttentionBlock) -> bool:
    """Return whether torch's flash attention serves a block, whose causal mask is at the end."""
    if block.is_causal and not block.is_aligned:
        return False
    head_dim = query.shape[-1]
    span = AttentionSpan(causal=block.is_causal)
    return obstacle_to_flash(query.device, query.dtype, span, head_dim=head_dim) is None


def _attend_by_flash(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scale: float
) -> tuple[Tensor, Tensor]:
    heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    found = _aten._scaled_dot_product_flash_attention(
        *heads, 0.0, block.is_causal, False, scale=scale
    )
    return found[0], found[1]


def _gradients_by_flash(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    block: AttentionBlock,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
    # Without dropout the kernel reads no random state.
    unused = torch.empty(0, dtype=torch.int64, device=query.device)
    sizes = (None, None, len(block.queries), len(block.keys))
    found = _aten._scaled_dot_product_flash_attention_backward(
        grad.to(query.dtype),
        *heads,
        out.to(query.dtype),
        log_sum.contiguous(),
        *sizes,
        0.0,
        block.is_causal,
        unused,
        unused,
        scale=scale,
    )
    return found[0], found[1], found[2]


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock, scale: float
) -> tuple[Tensor, Tensor]:
    queries, keys, values = _by_kv_head(query, key, value)
    scores = _scores(queries, keys, block, scale)
    log_sum = scores.logsumexp(-1)
    weights = _weights(scores, log_sum)
    return (weights @ values).flatten(1, 2), log_sum.flatten(1, 2)


def _gradients_by_products(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    block: AttentionBlock,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _by_kv_head(query, key, value)
    groups = queries.shape[1:3]
    grad, out = (tensor.to(queries.dtype).unflatten(1, groups) for tensor in (grad, out))
    scores = _scores(queries, keys, block, scale)
    weights = _weights(scores, log_sum.unflatten(1, groups))
    of_weights = grad @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * scale
    # The query heads of a key/value head add up.
    of_values = (weights.transpose(-1, -2) @ grad).sum(2)
    of_keys = (of_scores.transpose(-1, -2) @ queries).sum(2)
    return (of_scores @ keys).flatten(1, 2), of_keys, of_values


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads as (batch, kv_heads, query heads of each, rows, head_dim) in the sums' dtype."""
    kv_heads = key.shape[2]
    query, key, value = (
        tensor.permute(1, 2, 0, 3).to(dtype_of_sums(query.dtype)) for tensor in (query, key, value)
    )
    return query.unflatten(1, (kv_heads, -1)), key.unsqueeze(2), value.unsqueeze(2)


def _scores(queries: Tensor, keys: Tensor, block: AttentionBlock, scale: float) -> Tensor:
    scores = queries @ keys.transpose(-1, -2) * scale
    if not block.is_causal:
        return scores
    return scores.masked_fill(~seen_in(block, queries.device), -torch.inf)


def seen_in(block: AttentionBlock, device: torch.device) -> Bool[Tensor, "rows keys"]:
    """Return which keys each query of a causal block sees.

    Args:
        block: The block.
        device: Device of the result.
    """
    queries = torch.arange(len(block.queries), device=device)
    keys = torch.arange(len(block.keys), device=device)
    distance = block.offset + queries[:, None] - keys
    seen = distance >= 0
    return seen if block.window is None else seen & (distance < block.window)


def _weights(scores: Tensor, log_sum: Tensor) -> Tensor:
    # A query without keys has the weight 0 everywhere.
    return (scores - log_sum.masked_fill(log_sum.isneginf(), 0.0).unsqueeze(-1)).exp()
