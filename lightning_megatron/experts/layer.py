"""Mixture-of-experts layer: router, dispatcher, routed experts and an optional shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.routing.attached_loss import LossWeight
from lightning_megatron.experts.routing.router import Router
from lightning_megatron.experts.routing.statistics import RouterStatistics
from lightning_megatron.experts.shared import SharedExpert
from lightning_megatron.experts.transport.choose_transport import (
    TransportChoice,
    choose_transport,
)
from lightning_megatron.experts.transport.rank_rows import RankRows
from lightning_megatron.experts.transport.row_limit import LayerRows
from lightning_megatron.experts.transport.transit import (
    ExpertInput,
    ExpertOutput,
    PreparedTokens,
    TokensInTransit,
)
from lightning_megatron.groups.collectives import gather_from_axis, split_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.init import Initializer
from lightning_megatron.layers.recompute import recomputed
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import (
    ExpertsConfig,
    Transport,
    rows_received,
    worst_factor,
)
from lightning_megatron.plan.model_shape import Activation
from lightning_megatron.shapes import Float, Int


class MixtureOfExperts(nn.Module):
    """Send each token to the experts that the router selects, and sum their weighted outputs.

    Equal to ``sum of probability_e * MLP_e(x)`` over the selected experts of each token, plus the
    output of the shared expert. Also equal to Hugging Face's MixtralSparseMoeBlock,
    Qwen3MoeSparseMoeBlock, DeepseekV3MoE and GptOssMLP with the same weights.

    Without sequence parallelism all tp ranks have the same tokens, and each rank dispatches an
    equal share of them. Router losses are attached to the probabilities, scaled by the value of
    :attr:`loss_weight` at the time of the forward pass.

    With ``clones``, ranks with few rows compute some of those of ranks with many, in places for
    clones of busy experts. Results are then the same up to the order of summation.

    Communication: that of the router, the dispatcher, the shared expert and the clones. Without
        sequence parallelism also an all-gather over tp in the forward pass and one in the backward
        pass.

    Source: Shazeer et al. 2017; Lepikhin et al. 2020; DeepSeek-AI 2024 (shared expert).
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        mesh: ParallelMesh,
        *,
        activation: Activation = "swiglu",
        transport: Transport = "auto",
        clones: ExpertClones | None = None,
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.transport = transport
        self.clones = clones
        starts = {"initializer": initializer, "output_initializer": output_initializer}
        self.router = Router(config, hidden_size, mesh, initializer=initializer)
        self.experts = GroupedMLP(hidden_size, config, mesh, activation=activation, **starts)
        self.shared: SharedExpert | None = None
        if config.shared_ffn_hidden_size is not None:
            self.shared = SharedExpert(
                hidden_size,
                config.shared_ffn_hidden_size,
                mesh,
                has_gate=config.shared_gate,
                activation=activation,
                **starts,
            )
        #: Factor of the current microbatch's main loss, which also scales the router losses.
        self.loss_weight = LossWeight()
        self.statistics = RouterStatistics(config, mesh.device)
        #: Rows of this rank's experts in a step, counted once the counter is on.
        self.rank_rows = RankRows(mesh.device)
        #: Limit on the rows of this rank's experts; None without one.
        self.row_limit: LayerRows | None = None
        #: Whether graphs hold the experts, so that the host may not read their sizes.
        self.needs_static = False
        #: Whether the backward pass recomputes the activations of the experts.
        self.recomputes_experts = False
        #: Whether the backward pass sends and sorts the inputs of the experts again.
        self.sends_inputs_again = False
        # The mesh and the settings for which the transport was chosen.
        self._chosen: tuple[ParallelMesh, object, TransportChoice] | None = None

    @property
    def transport_choice(self) -> TransportChoice:
        """Return the transport of the layer's tokens, with the reason for its choice.

        It is chosen again after a change of the mesh or of these settings: the transport, the
        places for clones, the limit, and whether sizes must be static.
        """
        settings = (self.transport, self.clones, self.row_limit, self.needs_static)
        chosen = self._chosen
        if chosen is None or chosen[0] is not self.mesh or chosen[1] != settings:
            choice = choose_transport(
                self.config.num_experts,
                self.config.top_k,
                self.mesh,
                self.transport,
                has_shared=self.shared is not None,
                clones=self.clones,
                matrices=self.experts.matrices,
                limit=self.row_limit,
                needs_static=self.needs_static,
            )
            self._chosen = chosen = self.mesh, settings, choice
        return chosen[2]

    def transport_reason(self, dtype: torch.dtype) -> str:
        """Return the reason for the transport of tokens of a dtype, its traffic and its buffers."""
        choice = self.transport_choice
        if choice.transport == "none":
            return choice.reason
        ep = self.mesh.ep.size
        row = self.router.weight.shape[1] * dtype.itemsize
        received = rows_received(choice.transport, self.config, ep) * row
        reason = f"{choice.reason}; a rank receives {received:,.0f} bytes for each of its tokens"
        if choice.transport == "all_to_all":
            return reason
        limit = self.row_limit
        factor = worst_factor(self.config, ep) if limit is None else limit.limit.factor
        return f"{reason}, with buffers of {factor:g} times the even share"

    def forward(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the mixture's output for each token."""
        hidden, *routed = self.route(hidden)
        returned, shared = self.exchange(hidden, self.prepare(*routed))
        output = self.combine(returned, hidden)
        return output if shared is None else output + shared

    def route(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> tuple[
        Float[Tensor, "seq_local batch hidden"],
        Float[Tensor, "tokens hidden"],
        Float[Tensor, "tokens top_k"],
        Int[Tensor, "tokens top_k"],
    ]:
        """Select the experts of each token.

        Returns:
            The input for later readers; the tokens that this rank dispatches, with the
            probabilities and the numbers of their experts.
        """
        # The view sums the gradients of all its readers. If a CUDA graph runs this method
        # separately, it then gets one gradient, with the same sum as in a pass through the layer.
        hidden = hidden.view_as(hidden)
        routing = self.router(hidden)
        # A recomputed forward pass must not count its tokens twice.
        if self.training and not self.mesh.random.position.is_replay:
            self.statistics.add_(routing)
        probabilities = routing.losses.attach_to(routing.probabilities, self.loss_weight.value)
        tokens = hidden.flatten(0, 1)
        return (
            hidden,
            self._local_share(tokens),
            self._local_share(probabilities),
            self._local_share(routing.experts, fill=-1),
        )

    def prepare(
        self,
        tokens: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        selected: Int[Tensor, "tokens top_k"],
    ) -> PreparedTokens:
        """Return tokens in the order in which they are sent, all of it on the device."""
        return self.transport_choice.dispatcher.prepare(tokens, probabilities, selected)

    def exchange(
        self, hidden: Float[Tensor, "seq_local batch hidden"], prepared: PreparedTokens
    ) -> tuple[ExpertOutput, Float[Tensor, "seq_local batch hidden"] | None]:
        """Send tokens to experts, compute, and return their outputs and the shared expert's."""
        dispatched, shared = self.dispatch(hidden, prepared)
        del prepared  # The experts may need its memory.
        rows = self.compute(dispatched)
        return self.send_back(rows, dispatched), shared

    def dispatch(
        self, hidden: Float[Tensor, "seq_local batch hidden"], prepared: PreparedTokens
    ) -> tuple[ExpertInput, Float[Tensor, "seq_local batch hidden"] | None]:
        """Exchange tokens; return the rows of this rank's experts and the shared output."""
        sent = self.transport_choice.dispatcher.send(prepared)
        # The shared expert overlaps with the transport of tokens, and its backward pass with that
        # of their gradients.
        shared = None if self.shared is None else self.shared(hidden)
        return self._receive(sent), shared

    def send_back(
        self, rows: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Return the outputs of this rank's experts to the ranks of their tokens."""
        return self.transport_choice.dispatcher.send_back(rows, dispatched)

    def _receive(self, sent: TokensInTransit) -> ExpertInput:
        dispatched = self.transport_choice.dispatcher.receive(sent)
        if not (self.sends_inputs_again and torch.is_grad_enabled()):
            dispatched = replace(dispatched, tokens=None)
        if self.training and not self.mesh.random.position.is_replay:
            self.rank_rows.add_(dispatched.row_map.needed, dispatched.clones, self.mesh.ep.rank)
        return dispatched

    def compute(self, dispatched: ExpertInput) -> Float[Tensor, "rows hidden"]:
        """Return the outputs of the experts of this rank."""
        peers = self.transport_choice.clones
        clones = None if peers is None else peers.memory()
        again = self.transport_choice.dispatcher.rows_recipe(dispatched)
        experts: Callable[..., Tensor] = self.experts
        if self.recomputes_experts:
            experts = partial(recomputed, self.experts)
        return experts(dispatched.rows, dispatched.probabilities, dispatched.ends, clones, again)

    def combine(
        self, returned: ExpertOutput, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the weighted sum of the experts' outputs for each token."""
        output = self.transport_choice.dispatcher.combine(returned)
        if self._is_divided:
            output = gather_from_axis(output, self.mesh.tp, dim=0)[
                : hidden.shape[0] * hidden.shape[1]
            ]
        return output.view(hidden.shape)

    @property
    def _is_divided(self) -> bool:
        # The groups of ep and etp span tp ranks, and dispatchers need different tokens on every
        # rank.
        return self.mesh.tp.size > 1 and not self.mesh.sequence_parallel

    def _local_share(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        if not self._is_divided:
            return rows
        missing = -rows.shape[0] % self.mesh.tp.size
        padded = F.pad(rows, (0, 0, 0, missing), value=fill) if missing else rows
        return split_to_axis(padded, self.mesh.tp, dim=0)
