"""Bytes of activations that the layers keep for backward, and of their temporary buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_megatron.plan.attention_activations import AttentionCosts, attention_costs
from lightning_megatron.plan.eight_bits import EightBitCosts, EightBitLayers
from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.model_shape import LossChunk, ModelShape, tokens_of_chunk
from lightning_megatron.plan.network_activations import (
    MicrobatchShape,
    NetworkCosts,
    dense_costs,
    mixture_costs,
)
from lightning_megatron.plan.recomputation import WHOLE, Parts

#: Size of an int64, the type of the column index of a label (bytes).
_INDEX = 8


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
        slots: Symmetric buffer for tokens that are sent to experts; all blocks share one.
        waiting: What a block keeps from the input half of a backward pass to the weight half: the
            inputs of its matrix products, two of them in attention, and the gradients of their
            outputs.
        head_waiting: The same for the head.
        weight_half: Temporary buffers of the weight half: a gathered input, and the next one in
            transfer.
        captured_attention: The same as ``layer_backward``, for attention alone in a captured
            backward pass, which frees nothing of ``kept`` before its end.
        captured_network: The same for the MLP or the mixture of experts.
        network: Part of ``kept`` that belongs to the MLP or the mixture of experts, with its norm;
            0 if whole blocks are recomputed.
        experts: Part of ``network`` that experts produce between the transports of tokens.
        returned: Outputs of experts before their weighted sum, as an eager transport returns them.
        has_experts: Whether the block has experts instead of an MLP.
        static_transport: Whether the sizes of the tokens' transport are known in advance.
        is_whole: Whether the whole block is recomputed, so that it keeps only its input, or also
            the results of its attention core.
        on_host: Input of the block that is kept in host memory; 0 if it stays on the device.
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
    is_whole: bool = False
    on_host: int = 0


def activation_costs(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    *,
    seq_length: int = 0,
    recompute: Parts = (),
    has_experts: bool = False,
    loss_chunk: LossChunk = None,
    eight_bits: EightBitLayers | None = None,
) -> ActivationCosts:
    """Compute the bytes that one microbatch needs on one rank.

    Args:
        seq_length: Sequence length, needed only for attention masks and stored scores (tokens).
        recompute: Parts of the block that backward recomputes.
        has_experts: Whether the block has experts instead of an MLP.
        loss_chunk: Tokens whose logits exist at once; None stores those of all.
        eight_bits: Linear layers of the block that compute in 8 bits; None without any.
    """
    is_core_again = "selective" in recompute
    change = EightBitCosts.of(eight_bits, model, table, batch, is_core_again)
    network = _network_costs(model, table, batch, recompute, has_experts)
    heads = attention_costs(model, table, batch, seq_length)
    network, heads = _in_eight_bits(network, heads, change, batch, model.hidden_size, has_experts)
    stream = _Stream.of(model, table, batch, change.norms)
    layer = stream.norms + heads.kept + heads.core + network.kept + stream.masks
    is_full = not set(WHOLE).isdisjoint(recompute)
    results = heads.results if "full_except_core" in recompute else 0
    inside = _recomputed_inside(model, table, batch, network, recompute, change.frees_activation)
    num_norms = ("norms" in recompute) * change.num_norms_in_16_bits(has_experts)
    recomputed = layer - stream.boundary - results
    recomputed = recomputed if is_full else inside + num_norms * stream.boundary
    attention_buffers = heads.backward + (is_core_again or results > 0) * heads.core
    attention_buffers += 2 * stream.gathered
    # The MLP has finished its backward pass, and freed its memory, when attention starts its own.
    attention = attention_buffers - network.kept - stream.norms // 2
    widest = max(stream.gathered, change.forward) + stream.whole
    start = recomputed + network.recomputed_start if is_full else network.backward_start
    # The output of the norm before attention is recomputed after that of the MLP.
    last_norm = stream.boundary if num_norms else 0
    backward = max(start, recomputed - last_norm + network.backward, recomputed + attention)
    costs = ActivationCosts(
        layer=layer,
        kept=layer - recomputed - is_core_again * heads.core,
        masks=_mask_bytes(model, batch, seq_length),
        layer_forward=_forward_bytes(network, heads, widest, stream.norms, inside, is_full),
        layer_backward=backward + 2 * stream.boundary,
        waiting=heads.waiting + network.waiting,
        has_experts=has_experts,
        **_ends_and_transport(model, table, batch, loss_chunk, stream, network),
    )
    if is_full:
        return replace(costs, captured_network=costs.layer_backward, is_whole=True)
    captured = max(start, recomputed + network.captured_backward)
    norm = stream.norms // 2 + stream.masks // 2 - (stream.boundary if num_norms == 2 else 0)
    return _with_parts(costs, network, inside, norm, attention_buffers + last_norm, captured)


@dataclass(frozen=True)
class _Stream:
    """Bytes of the residual stream, and of what the norms and the dropout of a block keep.

    Args:
        whole: Hidden features of the tokens of all ranks of tp.
        boundary: Hidden features of this rank's tokens.
        gathered: Hidden features that a collective over tp gathers; 0 without one.
        statistics: Statistics of a norm.
        norms: Activations that both norms keep.
        masks: Masks of both dropouts.
    """

    whole: int
    boundary: int
    gathered: int
    statistics: int
    norms: int
    masks: int

    @classmethod
    def of(
        cls, model: ModelShape, table: KeptActivations, batch: MicrobatchShape, more_norms: int
    ) -> _Stream:
        whole = batch.num_tokens * batch.activation_bytes * model.hidden_size
        shards = batch.tp if batch.sequence_parallel else 1
        boundary = whole // shards
        statistics = batch.num_tokens * table.norm_bytes // shards
        masks = 2 * boundary // batch.activation_bytes if model.dropout else 0
        return cls(
            whole,
            boundary,
            gathered=whole if batch.sequence_parallel else 0,
            statistics=statistics,
            norms=table.hidden_copies * boundary + 2 * statistics + more_norms,
            masks=masks,
        )


def _ends_and_transport(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    loss_chunk: LossChunk,
    stream: _Stream,
    network: NetworkCosts,
) -> dict[str, Any]:
    """Return the costs that do not depend on recomputation, by the fields of ActivationCosts."""
    loss = _loss_costs(model, table, batch, loss_chunk)
    return {
        "boundary": stream.boundary,
        "head": (2 if model.final_norm else 1) * stream.boundary + stream.statistics,
        "head_backward": stream.whole + stream.gathered,
        "loss_kept": loss.kept,
        "loss_forward": loss.forward,
        "loss_backward": loss.backward,
        "slots": network.slots,
        "head_waiting": loss.waiting and stream.boundary + loss.waiting,
        "weight_half": 2 * stream.gathered,
        "returned": network.returned,
        "static_transport": network.has_static_transport,
    }


def _forward_bytes(
    network: NetworkCosts,
    heads: AttentionCosts,
    widest: int,
    norms: int,
    inside: int,
    is_full: bool,
) -> int:
    """Return the temporary buffers of a block's forward pass.

    Args:
        network: Costs of the MLP or the mixture.
        widest: Buffers of its largest product.
        norms: Activations that norms keep.
        inside: Activations of the MLP or of experts that are recomputed.
        is_full: Whether the whole block is recomputed.
    """
    # Recomputed activations are not kept, but they exist while the block runs.
    running = network.kept if is_full else inside
    rest = network.kept - network.recomputed if is_full else 0
    # The MLP keeps nothing yet when the attention core runs.
    first = heads.forward - network.kept - norms // 2
    return max(rest + widest, rest + network.forward, running, first)


def _network_costs(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    recompute: Parts,
    has_experts: bool,
) -> NetworkCosts:
    if not has_experts:
        return dense_costs(model, model.ffn_hidden_size, table, batch)
    replays = not {"experts", *WHOLE}.isdisjoint(recompute)
    return mixture_costs(model, table, batch, replays, sends_again="expert_inputs" in recompute)


def _in_eight_bits(
    network: NetworkCosts,
    heads: AttentionCosts,
    change: EightBitCosts,
    batch: MicrobatchShape,
    hidden_size: int,
    has_experts: bool,
) -> tuple[NetworkCosts, AttentionCosts]:
    """Return the costs of an MLP or a mixture, and of attention, with layers in 8 bits."""
    heads = replace(
        heads,
        kept=heads.kept + change.attention,
        waiting=heads.waiting + change.attention_waiting,
        backward=heads.backward + change.attention_backward,
    )
    second_forward = 0
    if change.forward:
        # A second forward pass also casts its inputs, and has outputs before and after the bias.
        second_forward = (
            change.forward + 2 * batch.num_tokens * batch.activation_bytes * hidden_size
        )
    network = replace(
        network,
        kept=network.kept + change.network,
        waiting=network.waiting + change.network_waiting,
        recomputed_start=max(network.recomputed_start, second_forward),
    )
    if has_experts:
        return network, heads
    backward = change.network_backward
    return replace(
        network,
        backward=max(network.backward, backward),
        captured_backward=max(network.captured_backward, backward),
    ), heads


def offloaded(costs: ActivationCosts) -> ActivationCosts:
    """Return the costs of a whole block whose input is offloaded to the host.

    Two inputs are on the device: in forward those that are being copied, in backward that of the
    running block and that of the block before it.

    Args:
        costs: Costs of a block that recomputes everything.
    """
    return replace(
        costs,
        kept=costs.kept - costs.boundary,
        layer_forward=costs.layer_forward + 2 * costs.boundary,
        layer_backward=costs.layer_backward + 2 * costs.boundary,
        on_host=costs.boundary,
    )


def _recomputed_inside(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    network: NetworkCosts,
    recompute: Parts,
    frees_activation: bool,
) -> int:
    """Return the bytes of the MLP, or of the experts, that are recomputed."""
    if network.recomputed:
        return network.recomputed if "experts" in recompute else 0
    if "activations" not in recompute:
        return 0
    # ReLU needs its output, and nothing else.
    inputs = 2 if model.gated else 1
    features = batch.num_tokens * batch.activation_bytes * (model.ffn_hidden_size // batch.tp)
    return (table.ffn_copies - frees_activation - inputs) * features


@dataclass(frozen=True)
class _LossCosts:
    """Bytes of the loss; the gradient of stored logits is kept until the weight half."""

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
        return _LossCosts(
            table.loss_kept * count,
            table.loss_forward * count,
            table.loss_backward * count,
            count * element,
        )
    # The kernels read the logits in place. Operators of torch copy half types to a wider type.
    chunk_bytes = (table.loss_forward or table.loss_kept) * min(chunk, batch.num_tokens) * rows
    kept = batch.num_tokens * (2 * batch.wide_bytes + _INDEX + 1)
    gathered = element * batch.num_tokens * model.hidden_size if batch.sequence_parallel else 0
    if option == "forward":
        # The gradient of the weight is kept. The gradient of the hidden states overwrites them.
        weight = rows * model.hidden_size * batch.wide_bytes
        return _LossCosts(weight, chunk_bytes + 2 * gathered, 0)
    # Chunks defer nothing to a weight half.
    return _LossCosts(kept, chunk_bytes + gathered, chunk_bytes)


def _with_parts(
    costs: ActivationCosts,
    network: NetworkCosts,
    inside: int,
    norm: int,
    attention: int,
    captured: int,
) -> ActivationCosts:
    """Return the costs of a block with those of its two parts.

    Args:
        costs: Costs of the block.
        network: Costs of the MLP or the mixture of experts.
        inside: Activations of that part that are recomputed (bytes).
        norm: What that part keeps for its norm and its dropout (bytes).
        attention: Temporary buffers of attention in a captured backward pass (bytes).
        captured: Temporary buffers of the other part in this pass (bytes).
    """
    return replace(
        costs,
        captured_attention=attention + 2 * costs.boundary,
        captured_network=captured + 2 * costs.boundary,
        network=network.kept - inside + norm,
        experts=max(0, network.inside - inside),
    )


def _mask_bytes(model: ModelShape, batch: MicrobatchShape, seq_length: int) -> int:
    """Return the bytes of the attention masks that the blocks of a chunk share."""
    if model.window is None or seq_length <= model.window:
        return 0
    # All samples of a microbatch share one mask of seq_length x seq_length scores.
    return seq_length**2 * batch.activation_bytes
