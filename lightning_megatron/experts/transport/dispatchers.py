"""Dispatchers that move tokens to the ranks of their experts, and the outputs back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.experts.transport.permute import RowMap, map_rows, permute_both, unpermute
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    all_reduce_,
    all_to_all_rows,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.in_flight import (
    InFlight,
    start_all_gather_sequence,
    start_all_to_all_rows,
)
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class AllToAllSizes:
    """Row counts of an all-to-all, kept for the way back.

    Args:
        row_map: Map from the selections of this rank's tokens to the rows it sent, sorted by
            expert.
        sends: Number of rows sent to each rank.
        receives: Number of rows received from each rank.
    """

    row_map: RowMap
    sends: tuple[int, ...]
    receives: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """Tokens in transit to the ranks of their experts.

    Shapes on arrival: hidden states ``(tokens, hidden)``; probabilities and experts
        ``(tokens, top_k)``, or ``(rows,)`` if rows travel by an all-to-all.

    Args:
        hidden: Hidden states of the tokens.
        probabilities: Factors of the experts' outputs.
        experts: Indices of the selected experts, in the numbering of the receiving rank.
        sizes: Row counts, if the tokens are sent by an all-to-all.
    """

    hidden: InFlight
    probabilities: InFlight
    experts: InFlight
    sizes: AllToAllSizes | None = None


@dataclass(frozen=True)
class Dispatched:
    """Input of this rank's experts.

    The ends are int32 on the device.

    Args:
        rows: Tokens sorted by expert. Rows past the last end belong to no expert.
        probabilities: Factor of each row's output.
        row_map: Map from the selections of the received tokens to the rows.
        sizes: Row counts, if the tokens came by an all-to-all.
        sent_experts: Experts selected for this rank's own tokens, if one-sided puts moved the
            tokens.
    """

    rows: Float[Tensor, "rows hidden"]
    probabilities: Float[Tensor, "rows"]
    row_map: RowMap
    sizes: AllToAllSizes | None = None
    sent_experts: Int[Tensor, "tokens top_k"] | None = None

    @property
    def ends(self) -> Int[Tensor, "experts"]:
        """Return the index one past the last row of each local expert."""
        return self.row_map.ends


class Dispatcher(Protocol):
    """Interface of the transports that bring tokens to experts and back.

    A dispatcher has no state: all that a call needs is in the result of the one before. Computation
    between :meth:`send` and :meth:`receive` overlaps with the communication, forward and backward.
    """

    @property
    def is_static(self) -> bool:
        """Return whether all sizes follow from input shapes, without a copy from device to host."""

    @property
    def needs_equal_counts(self) -> bool:
        """Return whether all its ranks must have the same number of tokens."""

    def send(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> Sent:
        """Start to send every token to the ranks of its experts.

        Args:
            hidden: Hidden states of this rank's tokens.
            probabilities: Factors of the selected experts' outputs.
            experts: Indices of the selected experts in the whole layer; -1 means none.
        """

    def receive(self, sent: Sent) -> Dispatched:
        """Wait for the tokens of this rank's experts, and sort them by expert."""

    def combine(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: Dispatched
    ) -> Float[Tensor, "tokens hidden"]:
        """Return outputs to the ranks of their tokens, and sum them for each token.

        The outputs are already multiplied by their probabilities.

        The outputs are undefined past the last end.
        """


@dataclass(frozen=True)
class LocalDispatcher:
    """Dispatcher without communication: it sorts this rank's tokens by expert.

    Sizes are static, and nothing is copied from the device to the host.

    Args:
        here: Experts of this rank. Selections of other experts are ignored.
    """

    here: ShardRange

    @property
    def is_static(self) -> bool:
        """Return ``True``: all sizes follow from input shapes."""
        return True

    @property
    def needs_equal_counts(self) -> bool:
        """Return ``False``: no other rank takes part."""
        return False

    def send(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> Sent:
        """Return the tokens as they are, without communication."""
        return Sent(InFlight(hidden), InFlight(probabilities), InFlight(experts))

    def receive(self, sent: Sent) -> Dispatched:
        """Sort the tokens of this rank's experts."""
        row_map = map_rows(sent.experts.wait(), self.here.start, self.here.size)
        return Dispatched(
            *permute_both(sent.hidden.wait(), sent.probabilities.wait(), row_map), row_map
        )

    def combine(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: Dispatched
    ) -> Float[Tensor, "tokens hidden"]:
        """Sum the outputs of each token."""
        return unpermute(outputs, dispatched.row_map)


@dataclass(frozen=True)
class GatherDispatcher:
    """Dispatcher that all-gathers the tokens of an axis and reduce-scatters the outputs.

    No token is dropped, whatever the routing. The ranks of the axis hold different tokens, in equal
    numbers. Over etp the ranks hold parts of the inner features of the same experts, so the sum
    over ranks is also the reduction that tensor parallelism needs.

    Args:
        inner: Dispatcher of the gathered tokens. With a :class:`LocalDispatcher` all sizes are
            static, and nothing is copied from the device to the host.
        axis: Axis over which tokens are gathered.

    Communication: ``send`` all-gathers tokens, probabilities and experts; its backward pass
        reduce-scatters the gradients of tokens and probabilities. ``combine`` reduce-scatters
        outputs; its backward pass all-gathers their gradients.
    """

    inner: Dispatcher
    axis: MeshAxis

    @property
    def is_static(self) -> bool:
        """Return whether the inner dispatcher is static."""
        return self.inner.is_static

    @property
    def needs_equal_counts(self) -> bool:
        """Return ``True``: an all-gather needs equal parts."""
        return True

    def send(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> Sent:
        """Start to all-gather the tokens, their probabilities and their experts."""
        return Sent(
            start_all_gather_sequence(hidden, self.axis),
            start_all_gather_sequence(probabilities, self.axis),
            start_all_gather_sequence(experts, self.axis),
        )

    def receive(self, sent: Sent) -> Dispatched:
        """Wait for the gathered tokens, and give them to the inner dispatcher."""
        gathered = sent.hidden.wait(), sent.probabilities.wait(), sent.experts.wait()
        return self.inner.receive(self.inner.send(*gathered))

    def combine(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: Dispatched
    ) -> Float[Tensor, "tokens hidden"]:
        """Sum the outputs of each token on this rank, then over all ranks."""
        return reduce_scatter_sequence(self.inner.combine(outputs, dispatched), self.axis)


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Dispatcher that sends one row for each selection to the rank of the selected expert.

    Only rows that an expert needs are sent, and no token is dropped. Buffer sizes depend on the
    routing, so the host reads one small tensor from the device. Ranks may have different numbers of
    tokens.

    Args:
        num_experts: Number of experts of the layer.
        axis: Axis that divides the experts into equal parts (ep).

    Communication: ``send`` exchanges counts, tokens and probabilities; its backward pass exchanges
        the gradients of tokens and probabilities. ``combine`` exchanges outputs; its backward pass
        exchanges their gradients.
    """

    num_experts: int
    axis: MeshAxis

    @property
    def is_static(self) -> bool:
        """Return ``False``: buffer sizes depend on the routing."""
        return False

    @property
    def needs_equal_counts(self) -> bool:
        """Return ``False``: ranks exchange their row counts."""
        return False

    def send(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> Sent:
        """Exchange row counts, read them on the host, and start to send the rows."""
        sent_map = map_rows(experts, 0, self.num_experts)
        sent_counts = torch.diff(sent_map.ends, prepend=sent_map.ends.new_zeros(1)).view(
            self.axis.size, -1
        )
        one_each = (1,) * self.axis.size
        received_counts = all_to_all_rows(sent_counts, one_each, one_each, self.axis)
        sends, receives = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()
        # `pairs` has room for all selections; dropped selections (-1) are past the rows that are
        # sent.
        sent_map = replace(sent_map, pairs=sent_map.pairs[: sum(sends)])
        rows, scales = (
            start_all_to_all_rows(tensor, sends, receives, self.axis)
            for tensor in permute_both(hidden, probabilities, sent_map)
        )
        # Rows arrive sorted by sending rank, then by expert: rebuild each row's expert index from
        # counts.
        num_here = sent_counts.shape[1]
        numbers = torch.arange(num_here, device=sent_counts.device).repeat(self.axis.size)
        found = torch.repeat_interleave(
            numbers, received_counts.flatten(), output_size=sum(receives)
        )
        return Sent(
            rows, scales, InFlight(found), AllToAllSizes(sent_map, tuple(sends), tuple(receives))
        )

    def receive(self, sent: Sent) -> Dispatched:
        """Wait for the rows, and sort them by expert."""
        row_map = map_rows(sent.experts.wait().unsqueeze(1), 0, self.num_experts // self.axis.size)
        rows = sent.hidden.wait()
        scales = sent.probabilities.wait()
        return Dispatched(*permute_both(rows, scales.unsqueeze(1), row_map), row_map, sent.sizes)

    def combine(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: Dispatched
    ) -> Float[Tensor, "tokens hidden"]:
        """Send outputs back to the ranks of their tokens, and sum them for each token."""
        sizes = dispatched.sizes
        assert sizes is not None, "these rows came by an all-to-all"
        rows = unpermute(outputs, dispatched.row_map)
        return unpermute(
            all_to_all_rows(rows, sizes.receives, sizes.sends, self.axis), sizes.row_map
        )


def check_equal_counts(num_tokens: int, mesh: ParallelMesh) -> None:
    """Raise on all ranks if the ranks that gather each other's tokens have different token counts.

    Args:
        num_tokens: Tokens of this rank's microbatch (tokens).
        mesh: The groups of this rank.

    Raises:
        RankMismatchError: If the token counts differ.

    Communication: an all-reduce on the CPU over the ranks that hold all experts of a stage
        together.
    """
    smallest, largest = all_reduce_(
        torch.tensor([-num_tokens, num_tokens]), mesh.experts_cpu, "max"
    ).tolist()
    if -smallest != largest:
        raise RankMismatchError(
            "the ranks that share experts must have equally many tokens in a microbatch: this rank "
            f"has {num_tokens}, the others have {-smallest} to {largest}. All-gathers and puts "
            "need equal parts. Pad sequences to one length, or use expert_transport='all_to_all' "
            "with etp=1."
        )
