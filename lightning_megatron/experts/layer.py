"""Mixture-of-experts layer: router, dispatcher, routed experts and an optional shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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
from lightning_megatron.layers.init import Initializer
from lightning_megatron.layers.recompute import recomputed
from lightning_megatron.layers.segments import Segment, SegmentList
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.plan.experts import ExpertsConfig, Transport
from lightning_megatron.plan.model_shape import Activation
from lightning_megatron.shapes import Float


class MixtureOfExperts(nn.Module):
    """Send each token to the experts that the router selects, and sum their weighted outputs.

    Equal to ``sum of probability_e * MLP_e(x)`` over the selected experts of each token, plus the
    output of the shared expert. Also equal to Hugging Face's MixtralSparseMoeBlock,
    Qwen3MoeSparseMoeBlock, DeepseekV3MoE and GptOssMLP with the same weights.

    The layer runs as a list of segments. Those from ``send`` to ``send_back`` are static if the
    dispatcher is, the others always. Without sequence parallelism all tp ranks have the same
    tokens, and each rank dispatches an equal share of them.

    Router losses are attached to the probabilities, scaled by the value of :attr:`loss_weight` at
    the time of the forward pass.

    Args:
        hidden_size: Size of each vector (elements).
        config: Settings of the mixture.
        mesh: The groups and random streams of this rank.
        activation: Activation of all experts, one of those of ``layers.mlp``.
        transport: Transport of tokens over ep.
        clones: Places for clones of busy experts, with which ranks with few rows compute some of
            those of ranks with many; None means none. Results are the same up to the order of
            summation.
        initializer: Initializer of the router and of the first matrix of each expert.
        output_initializer: Initializer of the second matrix of each expert.

    Raises:
        ParallelPlanError: If the experts do not divide by ep, their inner features by etp, or the
            inner features of the shared expert by tp.

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
        clones: CloneSettings | None = None,
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
        #: Whether the backward pass recomputes the activations of the experts.
        self.recomputes_experts = False
        #: Whether the backward pass sends and sorts the inputs of the experts again.
        self.sends_inputs_again = False
        # The mesh and the settings for which the transport and the segments were built.
        self._built: tuple[ParallelMesh, object, TransportChoice, SegmentList] | None = None

    @property
    def transport_choice(self) -> TransportChoice:
        """Return the transport of the layer's tokens, with the reason for its choice."""
        return self._parts()[0]

    def segments(self) -> SegmentList:
        """Return the list that a forward pass runs, from ``hidden`` to ``output``."""
        return self._parts()[1]

    def forward(
        self, hidden: Float[Tensor, "seq_local batch hidden"]
    ) -> Float[Tensor, "seq_local batch hidden"]:
        """Return the mixture's output for each token."""
        return self.segments()((hidden,))[0]

    def _parts(self) -> tuple[TransportChoice, SegmentList]:
        """Return the dispatcher and the segments.

        They are rebuilt if a later run has set another mesh, transport, limit or other places for
        clones.
        """
        settings = (self.transport, self.clones, self.row_limit)
        built = self._built
        if built is None or built[0] is not self.mesh or built[1] != settings:
            choice = choose_transport(
                self.config.num_experts,
                self.config.top_k,
                self.mesh,
                self.transport,
                has_shared=self.shared is not None,
                clones=self.clones,
                matrices=self.experts.matrices,
                limit=self.row_limit,
            )
            segments = self._list_segments(choice)
            self._built = built = self.mesh, settings, choice, segments
        return built[2:]

    def _list_segments(self, choice: TransportChoice) -> SegmentList:
        is_static = choice.dispatcher.is_static
        dispatch: dict[str, Any] = {"is_static": is_static, "scopes": ("preprocess",)}
        segments = [
            Segment(
                "route",
                self._route,
                ("hidden",),
                ("entered", "tokens", "probabilities", "selected"),
                scopes=("router",),
                modules=(self.router,),
            ),
            Segment(
                "prepare",
                self._prepare,
                ("tokens", "probabilities", "selected"),
                ("prepared",),
                scopes=("preprocess",),
            ),
            Segment("send", self._send, ("prepared",), ("sent",), starts_transfer=True, **dispatch),
        ]
        if self.shared is not None:
            # The shared expert runs between send and receive, where it overlaps with the transport
            # of tokens, and its backward pass with that of their gradients.
            segments.append(
                Segment(
                    "shared",
                    self.shared,
                    ("entered",),
                    ("shared",),
                    scopes=("preprocess",),
                    modules=(self.shared,),
                )
            )
        segments += [
            Segment(
                "receive",
                self._receive,
                ("sent",),
                ("dispatched",),
                modules=(self.experts,) if choice.puts_weights else (),
                starts_transfer=choice.puts_weights,
                **dispatch,
            ),
            Segment(
                "experts",
                self._compute,
                ("dispatched",),
                ("rows",),
                is_static,
                scopes=("experts",),
                modules=(self.experts,),
            ),
            Segment(
                "send_back",
                self._send_back,
                ("rows", "dispatched"),
                ("returned",),
                is_static,
                scopes=("combine",),
            ),
            Segment(
                "combine",
                self._combine,
                ("returned", "entered"),
                ("output",),
                scopes=("combine",),
            ),
        ]
        if self.shared is not None:
            segments.append(
                Segment("join", torch.add, ("output", "shared"), ("output",), scopes=("combine",))
            )
        return SegmentList(segments, ("hidden",), ("output",))

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # The view sums the gradients of all its readers. If this segment runs separately, it then
        # gets one gradient, with the same sum as in a pass through the whole layer.
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

    def _prepare(self, tokens: Tensor, probabilities: Tensor, selected: Tensor) -> PreparedTokens:
        return self.transport_choice.dispatcher.prepare(tokens, probabilities, selected)

    def _send(self, prepared: PreparedTokens) -> TokensInTransit:
        return self.transport_choice.dispatcher.send(prepared)

    def _receive(self, sent: TokensInTransit) -> ExpertInput:
        dispatched = self.transport_choice.dispatcher.receive(sent)
        if not (self.sends_inputs_again and torch.is_grad_enabled()):
            dispatched = replace(dispatched, tokens=None)
        if self.training and not self.mesh.random.position.is_replay:
            self.rank_rows.add_(dispatched.row_map.needed, dispatched.clones, self.mesh.ep.rank)
        return dispatched

    def _compute(self, dispatched: ExpertInput) -> Tensor:
        clones = None
        if dispatched.clones is not None:
            sources = self.transport_choice.clone_sources
            assert sources is not None, "clones need places"
            clones = sources(dispatched.clones)
        again = self.transport_choice.dispatcher.rows_recipe(dispatched)
        experts: Callable[..., Tensor] = self.experts
        if self.recomputes_experts:
            experts = partial(recomputed, self.experts)
        return experts(dispatched.rows, dispatched.probabilities, dispatched.ends, clones, again)

    def _send_back(self, rows: Tensor, dispatched: ExpertInput) -> ExpertOutput:
        return self.transport_choice.dispatcher.send_back(rows, dispatched)

    def _combine(self, returned: ExpertOutput, hidden: Tensor) -> Tensor:
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
