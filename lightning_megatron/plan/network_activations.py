"""How many bytes the network of a block, or the mixture of experts in its place, keeps and needs while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.plan.experts import ExpertsConfig, Transport, transport_over_ep
from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.model_shape import ModelShape
from lightning_megatron.plan.token_slots import TokenSlots

#: Positions in sorted rows, and numbers of experts, are int64.
_INDEX = 8


@dataclass(frozen=True)
class NetworkCosts:
    """Hold the bytes of one microbatch on one rank, in the network of a block.

    Args:
        kept: what it keeps beside its input.
        recomputed: how much of that the experts make again if asked to.
        forward: what its forward needs beside what it keeps.
        backward: what its backward needs beside what it keeps, at most; negative where it has given up more.
        backward_start: the same until experts have the gradients of their outputs.
        slots: memory that tokens are put into, one for all blocks.
    """

    kept: int
    forward: int
    backward: int
    recomputed: int = 0
    backward_start: int = 0
    slots: int = 0


@dataclass(frozen=True, kw_only=True)
class MicrobatchShape:
    """Describe a microbatch on one rank, and how its tokens are shared.

    Args:
        num_tokens: tokens on one rank of tp: sequence length / cp x samples.
        activation_bytes: size of an activation's element.
        tp: tensor-parallel size.
        sequence_parallel: whether the residual stream is cut along the sequence over tp.
        ep: ranks that share the experts of a block.
        etp: ranks that share the inner features of an expert.
        transport: how tokens come to the ranks of ep.
    """

    num_tokens: int
    activation_bytes: int = 2
    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    transport: Transport = "auto"

    @property
    def own_tokens(self) -> int:
        """Count the tokens that one rank, and no other of tp, sends to experts."""
        return -(-self.num_tokens // self.tp)

    @property
    def stream_tokens(self) -> int:
        """Count the tokens of the residual stream on one rank."""
        return self.num_tokens // self.tp if self.sequence_parallel else self.num_tokens

    @property
    def wide_bytes(self) -> int:
        """Return the size of an element of scores and probabilities: float32, or wider as activations are."""
        return max(4, self.activation_bytes)


def dense_costs(inner: int, hidden: int, table: KeptActivations, batch: MicrobatchShape) -> NetworkCosts:
    """Compute the bytes of the network that every token goes through.

    Args:
        inner: its inner features, on all ranks of tp.
        hidden: features of the residual stream.
        table: what layers keep.
        batch: the microbatch.
    """
    element = batch.num_tokens * batch.activation_bytes
    ffn, gathered = element * (inner // batch.tp), element * hidden if batch.sequence_parallel else 0
    # Its second projection (gradients gathered), its activation, its first projection (inputs gathered, gradients not
    # yet scattered; more than one tensor of F features has been given up by then).
    backward = max(ffn + gathered, table.ffn_backward * ffn, 2 * gathered - ffn)
    return NetworkCosts(kept=table.ffn_copies * ffn, forward=0, backward=backward)


def mixture_costs(
    model: ModelShape, table: KeptActivations, batch: MicrobatchShape, recomputes: bool = False
) -> NetworkCosts:
    """Compute the bytes of a mixture of experts.

    Over ep 1, by an all-gather and by puts, buffers have sizes that do not depend on the routing: the most rows that
    could come. By an all-to-all they have the sizes of the routing, which is taken to be balanced: as many rows come to
    a rank as leave it. No choice is taken to be dropped.

    Args:
        model: the model, which has experts.
        table: what layers keep.
        batch: the microbatch.
        recomputes: whether backward computes what experts make of their rows again.
    """
    experts, hidden, element = model.experts, model.hidden_size, batch.activation_bytes
    assert experts is not None, "the block has experts"
    rows = _RowCounts.of(experts, batch)
    inner = experts.ffn_hidden_size // batch.etp
    features = element * rows.buffer * inner
    vectors, choices = element * rows.buffer * hidden, element * rows.choices * hidden
    recomputed = (table.ffn_copies + table.expert_copies) * features
    kept = recomputed + vectors + rows.buffer * batch.wide_bytes + rows.map_bytes
    kept += batch.stream_tokens * _routing_bytes(experts, hidden, table, batch)
    kept += _shared_bytes(experts, hidden, table, batch)
    # Outputs of experts, and those of every choice; behind an all-to-all both again.
    forward = vectors + table.choice_copies * choices + (vectors + choices if rows.are_exchanged else 0)
    forward += element * batch.stream_tokens * hidden if experts.shared_ffn_hidden_size else 0
    gathered = element * rows.gathered * hidden if rows.gathered > batch.own_tokens else 0
    # Those of all experts' matrices, where they are made before they are added to those of earlier microbatches.
    matrix = table.expert_gradients * element * (experts.num_experts // batch.ep) * inner * hidden
    firsts = 2 if model.gated else 1
    wide = features // element * batch.wide_bytes
    moments = (
        # Second product.
        vectors + features + matrix,
        # Probabilities, in a wide type. What the second product kept has been given up; but a narrow gradient comes to
        # what the product with probabilities keeps, unless that is given up, too, as soon as it is read.
        3 * wide - (features if wide == features or recomputes else 0) if table.expert_copies else 0,
        # Activation, if it is one kernel.
        firsts * features,
        # First product, when experts have given up all features; the sum over every token's choices.
        vectors + firsts * (features + matrix) - recomputed,
        table.choice_copies * choices - recomputed,
    )
    return NetworkCosts(
        kept=kept,
        recomputed=recomputed,
        forward=max(forward, wide if table.expert_copies else 0),
        backward=max(moments),
        backward_start=gathered + min(1, table.choice_copies) * choices + vectors,
        slots=_slot_bytes(experts, hidden, batch) if rows.are_put else 0,
    )


@dataclass(frozen=True)
class _RowCounts:
    """Count what one rank has of tokens.

    Args:
        gathered: tokens that collectives bring together.
        choices: how many experts those chose together that it sorts by expert.
        buffer: rows of the buffer that its experts compute on.
        are_exchanged: whether rows come and go by an all-to-all.
        are_put: whether tokens are put into memory that ranks share.
    """

    gathered: int
    choices: int
    buffer: int
    are_exchanged: bool = False
    are_put: bool = False

    @classmethod
    def of(cls, experts: ExpertsConfig, batch: MicrobatchShape) -> _RowCounts:
        transport = transport_over_ep(experts.top_k, batch.ep, batch.transport)
        sent = batch.own_tokens * batch.etp
        if transport == "all_to_all":
            return cls(sent, sent * experts.top_k, sent * experts.top_k, are_exchanged=True)
        tokens = sent * batch.ep
        gathered = sent if transport == "one_sided" else tokens
        buffer = tokens * min(experts.top_k, experts.num_experts // batch.ep)
        return cls(gathered, tokens * experts.top_k, buffer, are_put=transport == "one_sided")

    @property
    def map_bytes(self) -> int:
        """Return the bytes that say where the choices of tokens lie in sorted rows, and whose these are."""
        return 2 * _INDEX * (self.choices + (self.buffer if self.are_exchanged else 0))


def _slot_bytes(experts: ExpertsConfig, hidden: int, batch: MicrobatchShape) -> int:
    """Return the memory that tokens are put into with what they chose."""
    return TokenSlots(
        num_ranks=batch.ep,
        num_tokens=batch.own_tokens * batch.etp,
        width=hidden,
        top_k=experts.top_k,
        element=batch.activation_bytes,
        scale=batch.wide_bytes,
    ).num_bytes


def _routing_bytes(experts: ExpertsConfig, hidden: int, table: KeptActivations, batch: MicrobatchShape) -> int:
    """Return what the router keeps for a token of its own."""
    wide, top_k = batch.wide_bytes, experts.top_k
    size = _INDEX * top_k + (top_k if experts.capacity_factor is not None else 0)
    size += wide * (experts.num_experts if table.router_keeps_logits else _num_scores(experts))
    if experts.jitter:
        # The factors and the product, in the place of the input.
        size += 2 * wide * hidden - (0 if experts.shared_ffn_hidden_size else batch.activation_bytes * hidden)
    return size


def _num_scores(experts: ExpertsConfig) -> int:
    """Count the numbers that operators on a token's scores keep."""
    is_sigmoid, count = experts.scoring == "sigmoid", 0
    if experts.normalize_top_k:
        count += experts.top_k + is_sigmoid
    if experts.aux_loss or is_sigmoid or not experts.normalize_top_k:
        count += experts.num_experts + (is_sigmoid and experts.aux_loss > 0)
    return count + (experts.num_experts + 1 if experts.z_loss else 0)


def _shared_bytes(experts: ExpertsConfig, hidden: int, table: KeptActivations, batch: MicrobatchShape) -> int:
    """Return what the network that every token goes through keeps."""
    if experts.shared_ffn_hidden_size is None:
        return 0
    kept = dense_costs(experts.shared_ffn_hidden_size, hidden, table, batch).kept
    # Its output and the gate's.
    gate = batch.activation_bytes * batch.stream_tokens * (hidden + 1) if experts.shared_gate else 0
    return kept + gate
