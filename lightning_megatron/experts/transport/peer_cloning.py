"""Dispatcher that puts tokens into the memory of the ranks of their experts, or of their clones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightning_megatron.experts.transport.cloning import place_clones, to_physical
from lightning_megatron.experts.transport.one_sided import OneSidedDispatcher
from lightning_megatron.experts.transport.peer_clones import PeerClones, PeerRound
from lightning_megatron.experts.transport.peer_passes import from_experts, to_experts
from lightning_megatron.experts.transport.permute import map_rows
from lightning_megatron.experts.transport.transit import Dispatched, Prepared, Returned, Sent
from lightning_megatron.plan.cloning import CloneSettings
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class PeerCloningDispatcher:
    """Dispatcher of one-sided puts to homes and places of clones, which it plans on the device.

    Equal to :class:`~lightning_megatron.experts.transport.cloning_dispatcher.CloningDispatcher`
    with an inner dispatcher of puts. Counts, weights and tokens share the barriers of the tokens,
    so that everything runs in :meth:`receive`.

    Args:
        inner: Dispatcher over the homes and places of all ranks.
        peers: Memories of the clones.
        settings: The places, and the smallest clone.

    Communication: that of the inner dispatcher, without further barriers. ``receive`` also puts
        counts and weights; its backward pass also reads gradients of clones. The backward pass of
        ``combine`` also puts weights.
    """

    inner: OneSidedDispatcher
    peers: PeerClones
    settings: CloneSettings

    @property
    def is_static(self) -> bool:
        """Return ``True``: all sizes follow from input shapes."""
        return True

    @property
    def needs_equal_counts(self) -> bool:
        """Return ``True``: all ranks have the same number of rows."""
        return True

    def prepare(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> Prepared:
        """Return the tokens as they are."""
        return self.inner.prepare(hidden, probabilities, experts)

    def send(self, prepared: Prepared) -> Sent:
        """Return the tokens as they are; :meth:`receive` transfers them."""
        return self.inner.send(prepared)

    def receive(self, sent: Sent) -> Dispatched:
        """Plan clones, put weights and tokens, and sort the received tokens."""
        peers = self.peers
        experts = sent.experts.wait()
        row_map = map_rows(experts, 0, peers.num_experts)
        counts = peers.exchange(row_map.ends)
        clones = place_clones(counts, self.settings.places, self.settings.min_rows)
        physical = to_physical(experts, row_map, clones, peers.axis.rank)
        moved = PeerRound(peers, clones)
        moved.put_weights()
        tokens = sent.hidden.wait(), sent.probabilities.wait(), physical
        inner = self.inner
        arrived = to_experts(*tokens, inner.here, inner.transfer, inner.limit, moved)
        return Dispatched(*arrived, sent_experts=physical, clones=clones)

    def send_back(self, outputs: Float[Tensor, "rows hidden"], dispatched: Dispatched) -> Returned:
        """Return the outputs as they are; :meth:`combine` transfers their sums."""
        return replace(self.inner.send_back(outputs, dispatched), clones=dispatched.clones)

    def combine(self, returned: Returned) -> Float[Tensor, "tokens hidden"]:
        """Put sums of outputs into the memory of the tokens' ranks, and sum those of all ranks."""
        assert returned.sent_experts is not None, "these rows were put here"
        assert returned.clones is not None, "clones were planned"
        moved = PeerRound(self.peers, returned.clones)
        rows = returned.rows, returned.row_map, returned.sent_experts
        return from_experts(*rows, self.inner.transfer, moved)
