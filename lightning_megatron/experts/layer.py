"""A mixture of experts in the place of a block's MLP: router, dispatcher, experts, and the MLP beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.experts.attached_loss import LossWeight
from lightning_megatron.experts.dispatch import Dispatched, Sent
from lightning_megatron.experts.dispatcher_choice import DispatcherChoice, choose_dispatcher
from lightning_megatron.experts.grouped_mlp import GroupedMLP
from lightning_megatron.experts.router import Router
from lightning_megatron.experts.segments import Segment, SegmentList
from lightning_megatron.experts.shared import SharedExpert
from lightning_megatron.experts.statistics import RouterStatistics
from lightning_megatron.groups.collectives import gather_from_axis, split_to_axis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import Initializer
from lightning_megatron.layers.mlp import Activation
from lightning_megatron.layers.recompute import recomputed
from lightning_megatron.plan.experts import ExpertsConfig, Transport


class MixtureOfExperts(nn.Module):
    """Send each token to the experts that its router chooses, and add up what they make of it.

    Equal to a loop over tokens and their experts, ``sum of probability_e * MLP_e(x)`` plus the output of the shared
    expert, and to Hugging Face's MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock and DeepseekV3MoE with the same weights.

    It is a list of segments. Those between the router and the sum of outputs are static where the dispatcher is.
    Without sequence parallelism all tp ranks have the same tokens; each of them then sends its own share.

    Losses of the router are attached to the probabilities, with the weight that :attr:`loss_weight` has when the layer
    runs.

    Shapes: ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output the same.

    Args:
        hidden_size: Size of each vector (elements).
        config: What the mixture is.
        mesh: The groups and random streams of this rank.
        activation: As of ``layers.mlp``, of all experts.
        transport: How tokens come to the ranks of ep.
        initializer: How first weights and the router's start.
        output_initializer: How second weights start.

    Raises:
        ParallelPlanError: If the experts do not divide by ep, their inner features by etp, or those of the shared
            expert by tp.

    Communication: that of router and dispatcher; without sequence parallelism an all-gather over tp forward, one
        backward; that of the shared expert.
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
        initializer: Initializer | None = None,
        output_initializer: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.transport = config, mesh, transport
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
        #: What the main loss of the microbatch that runs now is multiplied by.
        self.loss_weight = LossWeight()
        self.statistics = RouterStatistics(config, mesh.device)
        #: Whether the backward pass computes what the experts made of their rows again.
        self.recomputes_experts = False
        self._built: tuple[tuple[ParallelMesh, Transport], DispatcherChoice, SegmentList] | None = None

    @property
    def choice(self) -> DispatcherChoice:
        """Return what brings tokens to their experts, and why."""
        return self._parts()[0]

    @property
    def segments(self) -> SegmentList:
        """Return the pieces of the layer in the order in which they run."""
        return self._parts()[1]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the mixture's output for every token."""
        return self.segments(hidden)

    def _parts(self) -> tuple[DispatcherChoice, SegmentList]:
        """Return what follows from the groups, which a later run may change."""
        if self._built is None or self._built[0][0] is not self.mesh or self._built[0][1] != self.transport:
            sizes, has_shared = (self.config.num_experts, self.config.top_k), self.shared is not None
            choice = choose_dispatcher(*sizes, self.mesh, self.transport, has_shared=has_shared)
            self._built = (self.mesh, self.transport), choice, self._list_segments(choice.dispatcher.is_static)
        return self._built[1:]

    def _list_segments(self, is_static: bool) -> SegmentList:
        found = [
            Segment("route", self._route, ("hidden",), ("tokens", "probabilities", "chosen")),
            Segment("send", self._send, ("tokens", "probabilities", "chosen"), ("sent",), is_static),
        ]
        if self.shared is not None:
            # Here it runs beside the way of the tokens, and its backward pass beside that of their gradients.
            found.append(Segment("shared", self.shared, ("hidden",), ("shared",)))
        found += [
            Segment("receive", self._receive, ("sent",), ("dispatched",), is_static),
            Segment("experts", self._compute, ("dispatched",), ("rows",), is_static),
            Segment("combine", self._combine, ("rows", "dispatched", "hidden"), ("output",), is_static),
        ]
        if self.shared is not None:
            found.append(Segment("join", torch.add, ("output", "shared"), ("output",)))
        return SegmentList(found, ("hidden",), "output")

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routing = self.router(hidden)
        if self.training and not self.mesh.random.position.is_replay:
            self.statistics.add_(routing)
        probabilities = routing.losses.attach_to(routing.probabilities, self.loss_weight.value)
        tokens = hidden.flatten(0, 1)
        return self._own_share(tokens), self._own_share(probabilities), self._own_share(routing.experts, fill=-1)

    def _send(self, tokens: Tensor, probabilities: Tensor, chosen: Tensor) -> Sent:
        return self.choice.dispatcher.send(tokens, probabilities, chosen)

    def _receive(self, sent: Sent) -> Dispatched:
        return self.choice.dispatcher.receive(sent)

    def _compute(self, dispatched: Dispatched) -> Tensor:
        arguments = dispatched.rows, dispatched.probabilities, dispatched.ends
        return recomputed(self.experts, *arguments) if self.recomputes_experts else self.experts(*arguments)

    def _combine(self, rows: Tensor, dispatched: Dispatched, hidden: Tensor) -> Tensor:
        output = self.choice.dispatcher.combine(rows, dispatched)
        if self._is_shared_out:
            output = gather_from_axis(output, self.mesh.tp, dim=0)[: hidden.shape[0] * hidden.shape[1]]
        return output.view(hidden.shape)

    @property
    def _is_shared_out(self) -> bool:
        # The expert grid counts on every rank having tokens of its own.
        return self.mesh.tp.size > 1 and not self.mesh.sequence_parallel

    def _own_share(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        if not self._is_shared_out:
            return rows
        missing = -rows.shape[0] % self.mesh.tp.size
        padded = F.pad(rows, (0, 0, 0, missing), value=fill) if missing else rows
        return split_to_axis(padded, self.mesh.tp, dim=0)
