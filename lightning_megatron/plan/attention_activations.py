"""Activation memory of the attention of a block."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.latent_attention import LatentAttentionConfig
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.network_activations import MicrobatchShape


@dataclass(frozen=True)
class AttentionCosts:
    """Bytes that one microbatch needs on one rank in the attention of a block.

    Args:
        kept: Activations kept for backward, without the input and the sums of the scores' rows.
        core: What the core keeps besides its inputs and its output: sums of the rows of the scores
            in a fused kernel, weights and bounded scores in operators.
        results: Output of the core and log-sum-exps, from which its backward pass can start.
        forward: Temporary buffers of the core's forward pass.
        backward: Temporary buffers of the backward pass of queries, keys and values.
        waiting: Inputs of the matrix products, and gradients of their outputs, which wait for the
            weight half of a backward pass in halves.
    """

    kept: int
    core: int
    results: int
    forward: int
    backward: int
    waiting: int


def attention_costs(
    model: ModelShape, table: KeptActivations, batch: MicrobatchShape, seq_length: int
) -> AttentionCosts:
    """Compute the bytes that the attention of a block needs.

    Args:
        seq_length: Sequence length, needed only for stored scores (tokens).
    """
    query, key = model.widths(batch.tp)
    element = batch.num_tokens * batch.activation_bytes
    scores = _fused_scores(model, batch)
    if table.stores_scores:
        scores = _stored_scores(model, batch, seq_length)
    if model.latent is None:
        kept, waiting = _of_hidden(model, table, batch)
    else:
        kept, waiting = _of_latents(model, model.latent, table, batch)
    return AttentionCosts(
        kept,
        core=scores.kept,
        results=_result_bytes(model, batch),
        forward=scores.forward,
        # Gradients of Q, K and V, in half precision and fused.
        backward=element * (3 * query + 4 * key) + scores.backward,
        waiting=waiting + element * model.hidden_size,
    )


@dataclass(frozen=True)
class _Scores:
    """Bytes of the attention core in addition to its inputs, its output and their gradients."""

    kept: int
    forward: int
    backward: int


def _fused_scores(model: ModelShape, batch: MicrobatchShape) -> _Scores:
    query, _ = model.widths(batch.tp)
    # Sums of the rows of the scores; float32 sums of the gradient of Q.
    sums = 4 * batch.num_tokens
    return _Scores(sums * (query // model.head_dim), forward=0, backward=sums * query)


def _result_bytes(model: ModelShape, batch: MicrobatchShape) -> int:
    query, _ = model.widths(batch.tp)
    heads = query // model.head_dim
    size = model.head_dim
    if model.latent is not None:
        # Values are padded to the size of keys.
        heads = model.num_heads // batch.tp
        size = model.latent.head_dim
    return batch.num_tokens * heads * (size * batch.activation_bytes + batch.wide_bytes)


def _stored_scores(model: ModelShape, batch: MicrobatchShape, seq_length: int) -> _Scores:
    """Return the bytes of the core in operators of torch, which compute scores in float32."""
    query, _ = model.widths(batch.tp)
    pairs = batch.num_tokens * seq_length * (query // model.head_dim)
    wide = batch.wide_bytes
    # Softmax keeps its output. With half types, the product with the values keeps a copy of it.
    narrow = batch.activation_bytes if batch.activation_bytes < wide else 0
    kept = wide + narrow + (wide if model.soft_cap else 0)
    # Mask of the visible pairs.
    mask = seq_length**2
    forward = (2 + int(model.alibi)) * wide
    # Gradients of weights and of bounded scores, in addition to what was kept for them.
    backward = (1 + int(model.soft_cap)) * wide
    return _Scores(pairs * kept + mask, pairs * forward, pairs * backward)


def _of_hidden(
    model: ModelShape, table: KeptActivations, batch: MicrobatchShape
) -> tuple[int, int]:
    """Return the bytes kept for the backward pass, and those kept for the weight half.

    The gradient of the output is not counted.
    """
    query, key = model.widths(batch.tp)
    element = batch.num_tokens * batch.activation_bytes
    # The output of the QKV projection (values are a view of it), rotated or repeated copies of
    # queries and keys, and the output of the attention core.
    rotated = table.rotated_copies * (query + key)
    features = 2 * query + 2 * key + rotated + table.expanded_copies * 2 * query
    if table.stores_scores:
        # Products copy queries, keys and values, and keep no view of the projection's output.
        features = 4 * query + (query + 2 * key if model.qk_norm else 0)
    hidden = element * model.hidden_size // (batch.tp if batch.sequence_parallel else 1)
    return element * features, hidden + element * 2 * (query + key)


def _of_latents(
    model: ModelShape,
    latent: LatentAttentionConfig,
    table: KeptActivations,
    batch: MicrobatchShape,
) -> tuple[int, int]:
    """Return the same as :func:`_of_hidden` for latent attention (bytes)."""
    heads = model.num_heads // batch.tp
    element = batch.num_tokens * batch.activation_bytes
    divisor = batch.tp if batch.sequence_parallel else 1
    # Latent vectors before and after their norms.
    latents = 2 * latent.norm_features + latent.rotary_dim
    # Queries and keys with their rotated elements, the projection to keys and values (values are a
    # view of it), and the output of the attention core.
    up = latent.plain_dim + latent.value_dim
    features = 2 * latent.head_dim + up + latent.value_dim
    if table.padded_values:
        features = 4 * latent.head_dim + latent.value_dim
    # The projections to latent vectors compute their weight gradients at once.
    inputs = latent.norm_features + (model.hidden_size if latent.query_rank is None else 0)
    products = heads * (latent.head_dim + up + latent.value_dim)
    kept = element * heads * features + element * latents // divisor
    return kept, element * products + element * inputs // divisor
