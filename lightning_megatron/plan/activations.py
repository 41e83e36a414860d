"""Bytes of activations that the layers keep for backward, and of their temporary buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.loss_chunks import LossChunk, tokens_of_chunk
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.network_activations import (
    MicrobatchShape,
    NetworkCosts,
    dense_costs,
    mixture_costs,
)

#: Size of an int64, the type of a label's column (bytes).
_INDEX = 8

#: Part of a block that the backward pass computes again. ``none`` keeps all activations.
#: ``selective`` recomputes the attention core, ``experts`` the activations inside of experts.
#: ``full`` keeps the input of each block only.
Recompute = Literal["none", "selective", "experts", "full"]


@dataclass(frozen=True)
class ActivationCosts:
    """Bytes that one microbatch needs on one rank.

    Args:
        boundary: Residual stream between two blocks.
        layer: Activations that a block keeps without recomputation, its input included.
        kept: Activations that a block keeps under the chosen recomputation.
        masks: Attention masks that the blocks of a chunk share.
        layer_forward: Temporary buffers of a block's forward pass, in addition to ``kept``.
        layer_backward: Temporary buffers of a block's backward pass and recomputed activations, in
            addition to ``kept``.
        head: Activations that the final norm and the head keep.
        head_backward: Temporary buffers of the head's backward pass, in addition to ``head``.
        loss_kept: Activations that the loss keeps.
        loss_forward: Temporary buffers of the loss in forward, in addition to ``loss_kept``.
        loss_backward: Temporary buffers of the loss in backward, in addition to ``loss_kept``.
        slots: Symmetric buffer for tokens on their way to experts; all blocks share one.
        waiting: What a block keeps from the input half of a backward pass to the weight half: the
            inputs of its matrix products, and the gradients of their outputs.
        head_waiting: The same of the head.
        weight_half: Temporary buffers of the weight half: a gathered input, and the next one on its
            way.
        captured_attention: The same as ``layer_backward``, for attention alone in a captured
            backward pass, which frees nothing of ``kept`` before its end.
        captured_network: The same for the MLP or the mixture of experts.
        network: Part of ``kept`` that belongs to the MLP or the mixture of experts, with its norm;
            0 if whole blocks are recomputed.
        experts: Part of ``network`` that experts make between the transports of tokens.
        returned: Outputs of experts before their weighted sum, as an eager transport gives them.
        has_experts: Whether the block has experts instead of an MLP.
        static_transport: Whether the sizes of the tokens' transport are known in advance.
    """

    boundary: int
    layer: int
    kept: int
    masks: int
    layer_forward: int
    layer_backward: int
    head: int
    head_backward: int
    loss_kept: int
    loss_forward: int
    loss_backward: int
    slots: int
    waiting: int
    head_waiting: int
    weight_half: int
    captured_attention: int = 0
    captured_network: int = 0
    network: int = 0
    experts: int = 0
    returned: int = 0
    has_experts: bool = False
    static_transport: bool = True


def activation_costs(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    *,
    seq_length: int = 0,
    recompute: Recompute = "none",
    has_experts: bool = False,
    loss_chunk: LossChunk = None,
) -> ActivationCosts:
    """Compute the bytes that one microbatch needs on one rank.

    Args:
        model: Shape of the model.
        table: Activations that its layers keep.
        batch: Shape of the microbatch.
        seq_length: Sequence length, needed only for the size of attention masks (tokens).
        recompute: Part of the block that backward computes again.
        has_experts: Whether the block has experts instead of an MLP.
        loss_chunk: Tokens whose logits exist at once; None stores those of all.
    """
    network = dense_costs(model, model.ffn_hidden_size, table, batch)
    if has_experts:
        network = mixture_costs(model, table, batch, recomputes=recompute in ("experts", "full"))
    query, key = model.widths(batch.tp)
    num_tokens = batch.num_tokens
    element = num_tokens * batch.activation_bytes
    whole = element * model.hidden_size
    boundary = whole // batch.tp if batch.sequence_parallel else whole
    statistics = num_tokens * table.norm_bytes // (batch.tp if batch.sequence_parallel else 1)
    features = _attention_features(table, query, key)
    row_sums = num_tokens * 4 * (query // model.head_dim)
    masks = 2 * boundary // batch.activation_bytes if model.dropout else 0
    norms = table.hidden_copies * boundary + 2 * statistics
    layer = norms + element * features + row_sums + network.kept + masks
    gathered = whole if batch.sequence_parallel else 0
    again = {"none": 0, "selective": 0, "experts": network.recomputed, "full": layer - boundary}[
        recompute
    ]
    # The MLP has finished its backward pass when attention starts its own. The memory that the MLP
    # has freed is subtracted from the gradients of Q, K and V (in half precision, fused, and
    # float32 sums for Q).
    alone = element * (3 * query + 4 * key) + 4 * num_tokens * query
    attention = alone - network.kept - norms // 2
    # Recomputed activations are not kept, but they exist while the block runs.
    running = {"none": 0, "selective": 0, "experts": network.recomputed, "full": network.kept}[
        recompute
    ]
    others = network.kept - network.recomputed if recompute == "full" else 0
    forward = max(others + gathered + whole, others + network.forward, running)
    start = again + network.recomputed_start if recompute == "full" else network.backward_start
    backward = max(start, again + network.backward, again + attention + 2 * gathered)
    freed = row_sums if recompute == "selective" else again
    loss = _loss_costs(model, table, batch, loss_chunk)
    costs = ActivationCosts(
        boundary=boundary,
        layer=layer,
        kept=layer - freed,
        masks=_mask_bytes(model, batch, seq_length),
        layer_forward=forward,
        layer_backward=backward + 2 * boundary,
        head=(2 if model.final_norm else 1) * boundary + statistics,
        head_backward=whole + gathered,
        loss_kept=loss.kept,
        loss_forward=loss.forward,
        loss_backward=loss.backward,
        slots=network.slots,
        # Attention has the inputs and the output gradients of two products, too.
        waiting=boundary + element * 2 * (query + key) + whole + network.waiting,
        head_waiting=loss.waiting and boundary + loss.waiting,
        weight_half=2 * gathered,
        returned=network.returned,
        has_experts=has_experts,
        static_transport=network.has_static_transport,
    )
    if recompute == "full":
        return replace(costs, captured_network=costs.layer_backward)
    captured = max(start, again + network.captured_backward)
    parts = replace(network, kept=network.kept - again, inside=network.inside - again)
    return _with_parts(costs, parts, norms // 2 + masks // 2, alone + 2 * gathered, captured)


@dataclass(frozen=True)
class _LossCosts:
    """Bytes of the loss; the gradient of stored logits waits for a weight half."""

    kept: int
    forward: int
    backward: int
    waiting: int = 0


def _loss_costs(
    model: ModelShape, table: KeptActivations, batch: MicrobatchShape, option: LossChunk
) -> _LossCosts:
    rows = model.vocab_rows(batch.tp)
    element = batch.activation_bytes
    count = batch.num_tokens * rows
    chunk = tokens_of_chunk(option, batch.num_tokens, rows, element)
    if chunk is None:
        temporary = table.loss_forward * count, table.loss_backward * count
        return _LossCosts(table.loss_kept * count, *temporary, count * element)
    # The kernels work on the logits alone, operators of torch on a wider copy of half types.
    one = (table.loss_forward or table.loss_kept) * min(chunk, batch.num_tokens) * rows
    kept = batch.num_tokens * (2 * batch.wide_bytes + _INDEX + 1)
    gathered = element * batch.num_tokens * model.hidden_size if batch.sequence_parallel else 0
    # Chunks leave nothing to a weight half.
    return _LossCosts(kept, one + gathered, one)


def _with_parts(
    costs: ActivationCosts, network: NetworkCosts, norm: int, attention: int, captured: int
) -> ActivationCosts:
    """Return the costs of a block with those of its two parts.

    Args:
        costs: Costs of the block.
        network: Costs of the MLP or the mixture of experts.
        norm: What that part keeps for its norm and its dropout (bytes).
        attention: Temporary buffers of attention in a captured backward pass (bytes).
        captured: Those of the other part (bytes).
    """
    return replace(
        costs,
        captured_attention=attention + 2 * costs.boundary,
        captured_network=captured + 2 * costs.boundary,
        network=network.kept + norm,
        experts=network.inside,
    )


def _attention_features(table: KeptActivations, query: int, key: int) -> int:
    """Count the features that attention keeps for a token."""
    # The output of the QKV projection (values are a view of it), rotated or repeated copies of
    # queries and keys, and the output of the attention core.
    rotated = table.rotated_copies * (query + key)
    return 2 * query + 2 * key + rotated + table.expanded_copies * 2 * query


def _mask_bytes(model: ModelShape, batch: MicrobatchShape, seq_length: int) -> int:
    """Return the bytes of the attention masks that the blocks of a chunk share."""
    if model.window is None or seq_length <= model.window:
        return 0
    # All samples of a microbatch share one mask of seq_length x seq_length scores.
    return seq_length**2 * batch.activation_bytes
