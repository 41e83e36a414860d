"""The dispatcher that puts tokens into the memory of the ranks that hold their experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.experts.dispatch import Dispatched, Sent
from lightning_megatron.experts.peer_transfer import PeerTransfer, from_experts, to_experts
from lightning_megatron.groups.in_flight import InFlight
from lightning_megatron.plan.shards import ShardRange


@dataclass(frozen=True)
class OneSidedDispatcher:
    """Put every token into the memory of the ranks whose experts it chose, once for each of them.

    Nothing is sent in vain, no token is dropped, and nothing is read back from the device: a token's place is the same
    wherever it is put, so that memory has room for the tokens of all ranks, which have equally many. Tokens leave when
    those of others are received: what is computed before does not run beside.

    Args:
        here: The experts of this rank; all have equally many.
        transfer: What moves tokens and sums.

    Communication: receive puts tokens, probabilities and experts, backward sums of gradients; combine puts sums of
        outputs, backward gradients. Ranks wait for each other before and after.
    """

    here: ShardRange
    transfer: PeerTransfer

    @property
    def is_static(self) -> bool:
        """Tell that it is."""
        return True

    @property
    def needs_equal_counts(self) -> bool:
        """Tell that every rank's tokens have equally many places."""
        return True

    def send(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Sent:
        """Leave the tokens where they are, until others are ready for them."""
        return Sent(InFlight(hidden), InFlight(probabilities), InFlight(experts))

    def receive(self, sent: Sent) -> Dispatched:
        """Put tokens where their experts are and sort those that came by expert."""
        experts = sent.experts.wait()
        arrived = to_experts(sent.hidden.wait(), sent.probabilities.wait(), experts, self.here, self.transfer)
        return Dispatched(*arrived, choices=experts)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Put the sums of outputs where their tokens are, and add up those of all ranks."""
        assert dispatched.choices is not None, "these rows were put here"
        return from_experts(outputs, dispatched.row_map, dispatched.choices, self.transfer)
