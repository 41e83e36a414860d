"""Dispatchers that send some tokens of busy experts to clones of these experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from lightning_megatron.experts.transport.cloning import place_clones, to_physical
from lightning_megatron.experts.transport.dispatchers import OneSidedDispatcher, OuterDispatcher
from lightning_megatron.experts.transport.peer_clones import PeerClones, PeerRound
from lightning_megatron.experts.transport.peer_passes import from_experts, to_experts
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.experts.transport.transit import (
    ExpertInput,
    ExpertOutput,
    PreparedTokens,
    TokensInTransit,
)
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class CloningDispatcher(OuterDispatcher):
    """Dispatcher that passes physical experts (homes and places of clones) to another dispatcher.

    All ranks plan the same clones from the counts of all ranks. Probabilities stay those of the
    selected experts, so the router and its losses do not see the clones.

    Communication: ``prepare`` all-gathers the counts of selections; otherwise that of the inner
        dispatcher.
    """

    axis: MeshAxis
    num_experts: int
    settings: ExpertClones

    @override
    def prepare(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> PreparedTokens:
        """Plan clones, and replace the selected experts by physical ones."""
        row_map = map_rows(experts, 0, self.num_experts)
        every = all_gather_sequence(row_map.counts.unsqueeze(0), self.axis)
        clones = place_clones(every, self.settings.places, self.settings.min_rows)
        physical = to_physical(experts, row_map, clones, self.axis.rank)
        return replace(self.inner.prepare(hidden, probabilities, physical), clones=clones)

    @override
    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        """Start to send every token to the ranks of its physical experts."""
        return replace(self.inner.send(prepared), clones=prepared.clones)

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Wait for the tokens of this rank's homes and clones, and sort them."""
        return replace(self.inner.receive(sent), clones=sent.clones)


@dataclass(frozen=True, kw_only=True)
class PeerCloningDispatcher(OneSidedDispatcher):
    """Dispatcher of one-sided puts to homes and places of clones, which it plans on the device.

    Equal to :class:`CloningDispatcher` with an inner dispatcher of puts. Counts, weights and tokens
    share the barriers of the tokens, so that everything runs in :meth:`receive`. The local experts
    are the homes and places of this rank.

    Communication: that of :class:`OneSidedDispatcher`, without further barriers. ``receive`` also
        puts counts and weights; its backward pass also reads gradients of clones. The backward pass
        of ``combine`` also puts weights.
    """

    peers: PeerClones
    settings: ExpertClones

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Plan clones, put weights and tokens, and sort the received tokens."""
        peers = self.peers
        experts = sent.experts.wait()
        row_map = map_rows(experts, 0, peers.num_experts)
        counts = peers.exchange(row_map.ends)
        clones = place_clones(counts, self.settings.places, self.settings.min_rows)
        physical = to_physical(experts, row_map, clones, peers.axis.rank)
        moved = PeerRound(peers, clones)
        moved.put_weights(clones.owners)
        tokens = sent.hidden.wait()
        probabilities = sent.probabilities.wait()
        arrived = to_experts(
            tokens, probabilities, physical, self.local_experts, self.transfer, self.limit, moved
        )
        kept = tokens.detach()
        return ExpertInput(*arrived, sent_experts=physical, clones=clones, tokens=kept)

    @override
    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Return the outputs unchanged; :meth:`combine` transfers their sums."""
        return replace(super().send_back(outputs, dispatched), clones=dispatched.clones)

    @override
    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        """Put sums of outputs into the memory of the tokens' ranks, and sum those of all ranks."""
        assert returned.sent_experts is not None, "these rows were put here"
        assert returned.clones is not None, "clones were planned"
        moved = PeerRound(self.peers, returned.clones)
        return from_experts(
            returned.rows,
            returned.row_map,
            returned.sent_experts,
            self.transfer,
            moved,
            returned.tokens,
        )
