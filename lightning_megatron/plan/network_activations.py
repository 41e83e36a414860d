"""Activation memory of a block's MLP or of the mixture of experts that replaces it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_megatron.plan.experts import (
    ExpertsConfig,
    TokenBuffer,
    Transport,
    limited_rows,
    transport_over_ep,
)
from lightning_megatron.plan.kept_activations import KeptActivations
from lightning_megatron.plan.model_shape import ModelShape

#: Size of an int64, the type of row positions and expert indices (bytes).
_INDEX = 8


@dataclass(frozen=True)
class NetworkCosts:
    """Bytes that one microbatch needs on one rank in the MLP or the experts of a block.

    Args:
        kept: Activations kept for backward, without the input.
        forward: Temporary buffers of the forward pass, in addition to ``kept``.
        backward: Peak of temporary buffers in the backward pass, in addition to ``kept``; negative
            if more of ``kept`` has been freed by then.
        recomputed: Part of ``kept`` that is freed and recomputed if experts are recomputed.
        backward_start: Peak of temporary buffers in the backward pass before experts have the
            gradients of their outputs, in addition to ``kept``.
        recomputed_start: The same if the whole block is then recomputed: up to the sum of experts'
            outputs, whose backward pass reads their positions.
        slots: Symmetric buffer for tokens that are sent to experts; all blocks share one.
        waiting: Inputs of the matrix products, and gradients of their outputs, which wait for the
            weight half of a backward pass in halves.
        captured_backward: The same as ``backward`` if nothing of ``kept`` has been freed, except
            what is recomputed: a captured backward pass keeps all until its end.
        inside: Part of ``kept`` that experts produce between the transports of tokens.
        returned: Outputs of experts that the second transport returns.
        has_static_transport: Whether the sizes of the transport are known in advance.
    """

    kept: int
    forward: int
    backward: int
    recomputed: int = 0
    backward_start: int = 0
    recomputed_start: int = 0
    slots: int = 0
    waiting: int = 0
    captured_backward: int = 0
    inside: int = 0
    returned: int = 0
    has_static_transport: bool = True


@dataclass(frozen=True, kw_only=True)
class MicrobatchShape:
    """Size of a microbatch on one rank, and the parallel sizes that divide its tokens.

    Args:
        num_tokens: Tokens on one rank of tp: sequence length / cp x samples (tokens).
        activation_bytes: Size of an activation's element (bytes).
        ep: Number of ranks that share the experts of a block.
        etp: Number of ranks that share the inner features of an expert.
        transport: Transport of tokens to the ranks of ep.
        expert_rows: Limit on the rows of a rank's experts over an even share; None is the worst
            routing.
        clone_places: Places on every rank for clones of busy experts (places).
    """

    num_tokens: int
    activation_bytes: int = 2
    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int = 1
    transport: Transport = "auto"
    expert_rows: float | None = None
    clone_places: int = 0

    @property
    def local_tokens(self) -> int:
        """Count the tokens that this rank, and no other rank of tp, sends to experts."""
        return -(-self.num_tokens // self.tp)

    @property
    def stream_tokens(self) -> int:
        """Count the tokens of the residual stream on one rank."""
        return self.num_tokens // self.tp if self.sequence_parallel else self.num_tokens

    @property
    def wide_bytes(self) -> int:
        """Return the size of an element of scores and probabilities: at least that of float32."""
        return max(4, self.activation_bytes)


def dense_costs(
    model: ModelShape, inner: int, table: KeptActivations, batch: MicrobatchShape
) -> NetworkCosts:
    """Compute the bytes of an MLP that every token passes through.

    Args:
        inner: Inner features of the MLP, over all ranks of tp.
    """
    hidden = model.hidden_size
    element = batch.num_tokens * batch.activation_bytes
    stream = batch.stream_tokens * batch.activation_bytes * hidden
    ffn = element * (inner // batch.tp)
    gathered = element * hidden if batch.sequence_parallel else 0
    # In the order of backward: the second projection with gathered gradients; the activation; the
    # first projection with gathered inputs and gradients before their reduce-scatter. At least one
    # tensor of F features has been freed before the first projection.
    backward = max(ffn + gathered, table.ffn_backward * ffn, 2 * gathered - ffn)
    waiting = stream + (3 if model.gated else 2) * ffn + element * hidden
    return NetworkCosts(
        kept=table.ffn_copies * ffn,
        forward=0,
        backward=backward,
        waiting=waiting,
        captured_backward=max(backward, 2 * gathered),
    )


def mixture_costs(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    recomputes: bool = False,
    sends_again: bool = False,
) -> NetworkCosts:
    """Compute the bytes of a mixture of experts.

    Without expert parallelism, with an all-gather and with one-sided puts, buffers are sized for
    the worst routing, or have the rows of a limit. With an all-to-all they have the size of the
    actual routing, which is assumed to be balanced: a rank receives as many rows as it sends. No
    token is assumed to be dropped.

    Args:
        recomputes: Whether backward recomputes the activations inside experts.
        sends_again: Whether backward sends and sorts the inputs of experts again.
    """
    experts = model.experts
    hidden = model.hidden_size
    element = batch.activation_bytes
    assert experts is not None, "the block has experts"
    rows = _RowCounts.of(experts, batch)
    inner = experts.ffn_hidden_size // batch.etp
    features = element * rows.buffer * inner
    selections = element * rows.selections * hidden
    parts = mixture_activations(model, table, batch, sends_again)
    vectors = element * rows.buffer * hidden
    # Rows that exist in both passes and are not kept between them.
    passing = vectors if sends_again and not rows.are_exchanged else 0
    forward = passing + _output_bytes(model, table, batch, rows)
    if table.expert_copies:
        forward = max(forward, features // element * batch.wide_bytes)
    gathered = element * rows.gathered * hidden if rows.gathered > batch.local_tokens else 0
    firsts = 2 if model.gated else 1
    # Gradients of all experts' matrices, if they are computed before they are added to others.
    matrix = table.expert_gradients * element * (experts.num_experts // batch.ep) * inner * hidden
    largest_kept = _largest_kept(model, table, batch, features, vectors, matrix, recomputes)
    # First matrix product, after all inner features have been freed; then the sum over selections.
    freed = firsts * features + max(vectors, passing + firsts * matrix)
    last = max(freed, table.selection_copies * selections)
    start = gathered + min(1, table.selection_copies) * selections + vectors
    return NetworkCosts(
        kept=parts.total,
        recomputed=parts.products,
        forward=forward,
        backward=max(largest_kept, last - parts.products),
        captured_backward=max(largest_kept, last - recomputes * parts.products),
        backward_start=start,
        # Outputs and their copies exist in place of the gradient of rows.
        recomputed_start=start + table.selection_copies * selections,
        slots=_slot_bytes(experts, hidden, batch, sends_again) if rows.are_put else 0,
        waiting=2 * vectors + (firsts + 1) * features + _shared_costs(model, table, batch).waiting,
        inside=parts.products,
        returned=selections,
        has_static_transport=not rows.are_exchanged,
    )


def _largest_kept(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    features: int,
    vectors: int,
    matrix: int,
    recomputes: bool,
) -> int:
    """Return the peak of the backward pass of experts while their inner features are kept.

    Args:
        features: Inner features of the rows (bytes).
        vectors: Hidden features of the rows (bytes).
        matrix: Gradients of a matrix of all experts, before they are added (bytes).
        recomputes: Whether backward recomputes the activations inside experts.
    """
    activation = 3 if model.gated else 2
    second_product = vectors + features + matrix
    if not table.expert_copies:
        return max(second_product, activation * features)
    wide = features // batch.activation_bytes * batch.wide_bytes
    # Input of the second matrix product, which is recomputed for the gradients of its weights.
    second_input = features + (wide if wide > features else 0)
    # Product with the probabilities, in float32 or wider. In half types the gradient of its result
    # exists beside it, unless recomputation frees as much.
    scaling = 3 * wide + (0 if wide == features or recomputes else features)
    # The activation is one kernel, or operators.
    activation = max(activation, table.ffn_backward)
    return max(second_product, vectors + second_input, scaling, activation * features)


def _output_bytes(
    model: ModelShape, table: KeptActivations, batch: MicrobatchShape, rows: _RowCounts
) -> int:
    """Return the bytes of the outputs of experts, sorted by expert and by selection."""
    experts = model.experts
    assert experts is not None, "the block has experts"
    vector = batch.activation_bytes * model.hidden_size
    size = rows.buffer + table.selection_copies * rows.selections
    if rows.are_exchanged:
        # Send and receive buffers for both.
        size += rows.buffer + rows.selections
    if experts.shared_ffn_hidden_size:
        size += batch.stream_tokens
    return vector * size


@dataclass(frozen=True)
class MixtureActivations:
    """Bytes that a mixture of experts keeps for the backward pass of one microbatch.

    Outputs of experts are not among them: probabilities multiply the inner features, so that their
    gradients need no output.

    Args:
        inputs: Tokens sorted by expert, which the weight gradients of the first product read, or
            the tokens from which backward recomputes them.
        products: Outputs of the first product, and results of the activation before the input of
            the second one, which is recomputed.
        probabilities: Probability of every row.
        maps: Maps from selections to rows and back.
        router: Scores and selections of tokens.
        shared: The shared expert.
    """

    inputs: int
    products: int
    probabilities: int
    maps: int
    router: int
    shared: int

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        rows = self.inputs + self.products + self.probabilities + self.maps
        return rows + self.router + self.shared


def mixture_activations(
    model: ModelShape,
    table: KeptActivations,
    batch: MicrobatchShape,
    sends_again: bool = False,
) -> MixtureActivations:
    """Return what a mixture of experts keeps for the backward pass, by part.

    Args:
        sends_again: Whether backward sends and sorts the inputs of experts again.
    """
    experts = model.experts
    assert experts is not None, "the block has experts"
    rows = _RowCounts.of(experts, batch)
    element = batch.activation_bytes
    features = element * rows.buffer * (experts.ffn_hidden_size // batch.etp)
    inputs = rows.buffer
    if sends_again and not rows.are_exchanged:
        # The input of the layer is kept for the router, unless that keeps a product with it.
        has_own = rows.gathered == batch.local_tokens and not (
            experts.jitter and not experts.shared_ffn_hidden_size
        )
        inputs = 0 if has_own else rows.gathered
    routing = _routing_bytes(experts, model.hidden_size, table, batch)
    return MixtureActivations(
        inputs=element * inputs * model.hidden_size,
        products=(table.ffn_copies + table.expert_copies - 1) * features,
        probabilities=rows.buffer * batch.wide_bytes,
        maps=rows.map_bytes,
        router=batch.stream_tokens * routing,
        shared=_shared_costs(model, table, batch).kept,
    )


@dataclass(frozen=True)
class _RowCounts:
    """Number of tokens and rows on one rank.

    Args:
        gathered: Tokens that the rank has after a collective has gathered them.
        selections: Pairs (token, selected expert) that the rank sorts by expert.
        buffer: Rows of the buffer that its experts compute on.
        are_exchanged: Whether rows are sent and returned by an all-to-all.
        are_put: Whether tokens are put into symmetric memory.
    """

    gathered: int
    selections: int
    buffer: int
    are_exchanged: bool = False
    are_put: bool = False

    @classmethod
    def of(cls, experts: ExpertsConfig, batch: MicrobatchShape) -> _RowCounts:
        limit = batch.expert_rows
        transport = transport_over_ep(
            experts.top_k, batch.ep, batch.transport, is_limited=limit is not None
        )
        sent = batch.local_tokens * batch.etp
        if transport == "all_to_all":
            return cls(sent, sent * experts.top_k, sent * experts.top_k, are_exchanged=True)
        tokens = sent * batch.ep
        gathered = sent if transport == "one_sided" else tokens
        # A token may go to a home and to clones on the same rank.
        groups = experts.num_experts // batch.ep + batch.clone_places
        buffer = tokens * min(experts.top_k, groups)
        if limit is not None:
            buffer = min(buffer, limited_rows(limit, sent * experts.top_k))
        return cls(gathered, tokens * experts.top_k, buffer, are_put=transport == "one_sided")

    @property
    def map_bytes(self) -> int:
        """Return the bytes of the maps from selections to sorted rows and back."""
        return 2 * _INDEX * (self.selections + (self.buffer if self.are_exchanged else 0))


def _slot_bytes(
    experts: ExpertsConfig, hidden: int, batch: MicrobatchShape, sends_again: bool
) -> int:
    """Return the size of the symmetric buffers for tokens and their selections (bytes)."""
    tokens = TokenBuffer(
        num_ranks=batch.ep,
        num_tokens=batch.local_tokens * batch.etp,
        width=hidden,
        top_k=experts.top_k,
        element=batch.activation_bytes,
        scale=batch.wide_bytes,
    )
    return tokens.num_bytes + (replace(tokens, scale=0).num_bytes if sends_again else 0)


def _routing_bytes(
    experts: ExpertsConfig, hidden: int, table: KeptActivations, batch: MicrobatchShape
) -> int:
    """Return the bytes that the router keeps for one token."""
    wide = batch.wide_bytes
    top_k = experts.top_k
    size = _INDEX * top_k + (top_k if experts.capacity_factor is not None else 0)
    size += wide * (experts.num_experts if table.router_keeps_logits else _num_scores(experts))
    if experts.jitter:
        # The random factors and their product with the input are kept instead of the input, which
        # only a shared MLP still needs.
        size += 2 * wide * hidden - (
            0 if experts.shared_ffn_hidden_size else batch.activation_bytes * hidden
        )
    return size


def _num_scores(experts: ExpertsConfig) -> int:
    """Count the numbers that operators on a token's scores keep for backward."""
    is_sigmoid = experts.scoring == "sigmoid"
    count = 0
    if experts.normalize_top_k:
        count += experts.top_k + is_sigmoid
    if experts.aux_loss or is_sigmoid or not experts.normalize_top_k:
        count += experts.num_experts + (is_sigmoid and experts.aux_loss > 0)
    return count + (experts.num_experts + 1 if experts.z_loss else 0)


def _shared_costs(
    model: ModelShape, table: KeptActivations, batch: MicrobatchShape
) -> NetworkCosts:
    """Compute the bytes of the shared MLP and its gate."""
    experts = model.experts
    hidden = model.hidden_size
    if experts is None or experts.shared_ffn_hidden_size is None:
        return NetworkCosts(kept=0, forward=0, backward=0)
    inner = experts.shared_ffn_hidden_size
    costs = dense_costs(model, inner, table, batch)
    # The gate keeps the MLP's output and its own.
    gate = batch.activation_bytes * batch.stream_tokens * (hidden + 1) if experts.shared_gate else 0
    return replace(costs, kept=costs.kept + gate)
