"""How many bytes the layers keep for their backward pass, and how many they need beside that while they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.network_activations import MicrobatchShape, dense_costs, mixture_costs

#: What backward computes again.
Recompute = Literal["none", "selective", "experts", "full"]


@dataclass(frozen=True)
class ActivationCosts:
    """Hold the bytes of one microbatch on one rank.

    Args:
        boundary: the residual stream between two blocks.
        layer: what a block keeps, its input included, before recomputation is chosen.
        kept: what it keeps under the recomputation that was chosen.
        masks: what the blocks of a chunk keep together.
        layer_forward: what a block's forward needs beside what it keeps.
        layer_backward: what a block's backward needs beside what it keeps, with what is computed again.
        head: what the final norm and the head keep.
        head_backward: what the head's backward needs beside that.
        loss_kept: what the loss keeps.
        loss_forward: what the loss needs beside that in forward.
        loss_backward: what it needs beside that in backward.
        slots: memory that tokens are put into on their way to experts, one for all blocks.
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
        model: the model.
        table: what its layers keep.
        batch: the microbatch.
        seq_length: length of the sequences, where there may be masks (tokens).
        recompute: "none", "selective" (the attention core runs again), "experts" (they do) or "full" (whole blocks do).
        has_experts: whether the block has experts in the place of its network.
    """
    if has_experts:
        network = mixture_costs(model, table, batch, recomputes=recompute in ("experts", "full"))
    else:
        network = dense_costs(model.ffn_hidden_size, model.hidden_size, table, batch)
    query, key = model.widths(batch.tp)
    num_tokens, element = batch.num_tokens, batch.num_tokens * batch.activation_bytes
    whole = element * model.hidden_size
    boundary = whole // batch.tp if batch.sequence_parallel else whole
    statistics = num_tokens * table.norm_bytes // (batch.tp if batch.sequence_parallel else 1)
    # Attention: the projection's output (values are a view of it), rotated or repeated ones, the output of the core.
    features = 2 * query + 2 * key + table.rotated_copies * (query + key) + table.expanded_copies * 2 * query
    row_sums = num_tokens * 4 * (query // model.head_dim)
    masks = 2 * boundary // batch.activation_bytes if model.dropout else 0
    norms = table.hidden_copies * boundary + 2 * statistics
    layer = norms + element * features + row_sums + network.kept + masks
    gathered = whole if batch.sequence_parallel else 0
    again = {"none": 0, "selective": 0, "experts": network.recomputed, "full": layer - boundary}[recompute]
    # When attention runs backward, the block's network is done: what it kept pays for the gradients of Q, K and V
    # (half, joined, and float32 sums for Q).
    attention = element * (3 * query + 4 * key) + 4 * num_tokens * query - network.kept - norms // 2
    # What is recomputed is not kept, but its features exist while it runs.
    running = {"none": 0, "selective": 0, "experts": network.recomputed, "full": network.kept}[recompute]
    others = network.kept - network.recomputed if recompute == "full" else 0
    forward = max(others + gathered + whole, others + network.forward, running)
    start = network.backward_start + (again if recompute == "full" else 0)
    backward = max(start, again + network.backward, again + attention + 2 * gathered)
    logits = num_tokens * model.vocab_rows(batch.tp)
    return ActivationCosts(
        boundary=boundary,
        layer=layer,
        kept=layer - (row_sums if recompute == "selective" else again),
        # Rows alike share one mask, which fills whole rows of scores.
        masks=seq_length**2 * batch.activation_bytes if model.window is not None and seq_length > model.window else 0,
        layer_forward=forward,
        layer_backward=backward + 2 * boundary,
        head=(2 if model.final_norm else 1) * boundary + statistics,
        head_backward=whole + gathered,
        loss_kept=table.loss_kept * logits,
        loss_forward=table.loss_forward * logits,
        loss_backward=table.loss_backward * logits,
        slots=network.slots,
    )
