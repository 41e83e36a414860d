"""Bytes of activations that the layers keep for backward, and of their temporary buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.network_activations import MicrobatchShape, dense_costs, mixture_costs

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
        weight_half: Temporary buffers of the weight half.
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


def activation_costs(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    *,
    seq_length: int = 0,
    recompute: Recompute = "none",
    has_experts: bool = False,
) -> ActivationCosts:
    """Compute the bytes that one microbatch needs on one rank.

    Args:
        model: Shape of the model.
        table: Activations that its layers keep.
        batch: Shape of the microbatch.
        seq_length: Sequence length, needed only for the size of attention masks (tokens).
        recompute: Part that backward computes again: "none", "selective" (the attention core),
            "experts" or "full" (whole blocks).
        has_experts: Whether the block has experts instead of an MLP.
    """
    if has_experts:
        network = mixture_costs(model, table, batch, recomputes=recompute in ("experts", "full"))
    else:
        network = dense_costs(model, model.ffn_hidden_size, table, batch)
    query, key = model.widths(batch.tp)
    num_tokens = batch.num_tokens
    element = num_tokens * batch.activation_bytes
    whole = element * model.hidden_size
    boundary = whole // batch.tp if batch.sequence_parallel else whole
    statistics = num_tokens * table.norm_bytes // (batch.tp if batch.sequence_parallel else 1)
    # Attention keeps the output of the QKV projection (values are a view of it), rotated or
    # repeated copies of queries and keys, and the output of the attention core.
    features = (
        2 * query
        + 2 * key
        + table.rotated_copies * (query + key)
        + table.expanded_copies * 2 * query
    )
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
    attention = element * (3 * query + 4 * key) + 4 * num_tokens * query - network.kept - norms // 2
    # Recomputed activations are not kept, but they exist while the block runs.
    running = {"none": 0, "selective": 0, "experts": network.recomputed, "full": network.kept}[
        recompute
    ]
    others = network.kept - network.recomputed if recompute == "full" else 0
    forward = max(others + gathered + whole, others + network.forward, running)
    start = network.backward_start + (again if recompute == "full" else 0)
    backward = max(start, again + network.backward, again + attention + 2 * gathered)
    freed = row_sums if recompute == "selective" else again
    norms_of_head = 2 if model.final_norm else 1
    logits = num_tokens * model.vocab_rows(batch.tp)
    return ActivationCosts(
        boundary=boundary,
        layer=layer,
        kept=layer - freed,
        masks=_mask_bytes(model, batch, seq_length),
        layer_forward=forward,
        layer_backward=backward + 2 * boundary,
        head=norms_of_head * boundary + statistics,
        head_backward=whole + gathered,
        loss_kept=table.loss_kept * logits,
        loss_forward=table.loss_forward * logits,
        loss_backward=table.loss_backward * logits,
        slots=network.slots,
        # Attention has the inputs and the output gradients of two products, too.
        waiting=boundary + element * 2 * (query + key) + whole + network.waiting,
        head_waiting=boundary + logits * batch.activation_bytes,
        # A gathered input, and the next one on its way.
        weight_half=2 * gathered,
    )


def _mask_bytes(model: ModelShape, batch: MicrobatchShape, seq_length: int) -> int:
    """Return the bytes of the attention masks that the blocks of a chunk share."""
    if model.window is None or seq_length <= model.window:
        return 0
    # All samples of a microbatch share one mask of seq_length x seq_length scores.
    return seq_length**2 * batch.activation_bytes
