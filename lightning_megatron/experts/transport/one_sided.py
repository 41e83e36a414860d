"""Dispatcher that writes tokens into the memory of the ranks of their experts by one-sided puts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_megatron.experts.transport.peer_passes import from_experts, sort_again, to_experts
from lightning_megatron.experts.transport.peer_transfer import PeerTransfer
from lightning_megatron.experts.transport.row_limit import LayerRows
from lightning_megatron.experts.transport.transit import (
    ExpertInput,
    ExpertOutput,
    PreparedTokens,
    TokensInTransit,
)
from lightning_megatron.groups.in_flight import InFlight
from lightning_megatron.layers.remade import Recipe
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class OneSidedDispatcher:
    """Dispatcher that puts each token into the memory of the ranks of its selected experts, once.

    Only the needed tokens are sent, no token is dropped, and nothing is copied from the device to
    the host. A token has the same row on every rank, so each buffer has room for the tokens of all
    ranks, and all ranks must have the same number. The puts run in :meth:`receive`, so computation
    between :meth:`send` and :meth:`receive` does not overlap with them.

    Args:
        local_experts: Experts of this rank; all ranks have the same number.
        transfer: Transfer of tokens and of sums of outputs.
        limit: Limit on the rows of this rank's experts; None without one.

    Communication: ``receive`` puts tokens, probabilities and experts; its backward pass puts sums
        of gradients. ``combine`` puts sums of outputs; its backward pass puts gradients, and tokens
        again if the rows of experts were not kept. A barrier precedes and follows each transfer.
    """

    local_experts: ShardRange
    transfer: PeerTransfer
    limit: LayerRows | None = None

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
    ) -> PreparedTokens:
        """Return the tokens unchanged."""
        return PreparedTokens(hidden, probabilities, experts)

    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        """Return the tokens unchanged; :meth:`receive` transfers them."""
        return TokensInTransit(
            InFlight(prepared.hidden), InFlight(prepared.probabilities), InFlight(prepared.experts)
        )

    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Put tokens into the memory of their experts' ranks, and sort the received tokens."""
        experts = sent.experts.wait()
        tokens = sent.hidden.wait()
        probabilities = sent.probabilities.wait()
        self.transfer.begin()
        arrived = to_experts(
            tokens, probabilities, experts, self.local_experts, self.transfer, self.limit
        )
        return ExpertInput(*arrived, sent_experts=experts, tokens=tokens.detach())

    def rows_recipe(self, dispatched: ExpertInput) -> Recipe | None:
        """Return how to sort the tokens that the backward pass of :meth:`combine` puts again."""
        tokens = dispatched.tokens
        experts = dispatched.sent_experts
        if tokens is None:
            return None
        assert experts is not None, "these rows were put here"
        # Allocated here, so that a layer that has run forward once can be captured.
        self.transfer.buffer_again(tokens, experts)
        sort = partial(sort_again, self.transfer)
        return Recipe.of(sort, tokens, experts, *dispatched.row_map.tensors)

    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Return the outputs unchanged; :meth:`combine` transfers their sums."""
        sent = dispatched.sent_experts
        return ExpertOutput(outputs, dispatched.row_map, sent, tokens=dispatched.tokens)

    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        """Put sums of outputs into the memory of the tokens' ranks, and sum those of all ranks."""
        assert returned.sent_experts is not None, "these rows were put here"
        return from_experts(
            returned.rows,
            returned.row_map,
            returned.sent_experts,
            self.transfer,
            tokens=returned.tokens,
        )
