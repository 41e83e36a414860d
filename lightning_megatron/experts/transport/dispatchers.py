"""Dispatchers that move tokens to the ranks of their experts, and the outputs back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.experts.transport.peer_clones import PeerClones, PeerRound
from lightning_megatron.experts.transport.peer_passes import from_experts, sort_again, to_experts
from lightning_megatron.experts.transport.peer_transfer import PeerTransfer
from lightning_megatron.experts.transport.permute import (
    RowMap,
    map_rows,
    permute,
    permute_both,
    unpermute,
)
from lightning_megatron.experts.transport.row_limit import LayerRows, map_within
from lightning_megatron.experts.transport.transit import (
    AllToAllSizes,
    ExpertInput,
    ExpertOutput,
    PreparedTokens,
    RowCounts,
    TokensInTransit,
)
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
from lightning_megatron.groups.turns import PassTurns
from lightning_megatron.layers.parameters.remade import Recipe
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.shapes import Float, Int


class Dispatcher(ABC):
    """Transport that brings tokens to experts and back.

    The steps are :meth:`prepare`, :meth:`send`, :meth:`receive`, the experts, :meth:`send_back` and
    :meth:`combine`. The sizes in the first and the last step follow from input shapes, and the host
    does not wait. A dispatcher has no state: everything that a step needs is in the result of the
    previous one. Computation between :meth:`send` and :meth:`receive` overlaps with the
    communication, forward and backward.

    The steps here leave everything on this rank, without communication.
    """

    @property
    def is_static(self) -> bool:
        """Return whether all sizes follow from input shapes, without a copy from device to host."""
        return True

    @property
    def needs_equal_counts(self) -> bool:
        """Return whether all its ranks must have the same number of tokens."""
        return False

    def prepare(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> PreparedTokens:
        """Do what can be done before tokens are sent, with sizes that follow from input shapes.

        Experts are numbered in the whole layer; -1 means none.
        """
        return PreparedTokens(hidden, probabilities, experts)

    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        """Start to send every token to the ranks of its experts."""
        return TokensInTransit(
            InFlight(prepared.hidden), InFlight(prepared.probabilities), InFlight(prepared.experts)
        )

    @abstractmethod
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Wait for the tokens of this rank's experts, and sort them by expert."""

    @abstractmethod
    def rows_recipe(self, dispatched: ExpertInput) -> Recipe | None:
        """Return how the backward pass recomputes the rows of the experts; None if it keeps them.

        The tokens of ``dispatched`` are then kept, and :meth:`combine` may send them again in its
        backward pass.
        """

    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Return outputs to the ranks of their tokens, as far as sizes depend on the routing.

        The outputs are already multiplied by their probabilities, and undefined past the last end.
        """
        return ExpertOutput(outputs, dispatched.row_map)

    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        """Sum the outputs of each token, with sizes that follow from input shapes."""
        return unpermute(returned.rows, returned.row_map)


@dataclass(frozen=True)
class OuterDispatcher(Dispatcher):
    """Dispatcher that changes some steps of another one, and leaves it the others."""

    inner: Dispatcher

    @property
    @override
    def is_static(self) -> bool:
        return self.inner.is_static

    @property
    @override
    def needs_equal_counts(self) -> bool:
        return self.inner.needs_equal_counts

    @override
    def rows_recipe(self, dispatched: ExpertInput) -> Recipe | None:
        return self.inner.rows_recipe(dispatched)

    @override
    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        return self.inner.send_back(outputs, dispatched)

    @override
    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        return self.inner.combine(returned)


@dataclass(frozen=True)
class SwitchingDispatcher(OuterDispatcher):
    """Dispatcher that lets another microbatch compute while the tokens of one travel.

    Both passes of its communication end a turn once it has started: the forward pass behind it, and
    the backward pass in front of it.
    """

    turns: PassTurns

    @override
    def prepare(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> PreparedTokens:
        return self.inner.prepare(hidden, probabilities, experts)

    @override
    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        hidden = self.turns.after_backward(prepared.hidden)
        return self.inner.send(replace(prepared, hidden=hidden))

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        received = self.inner.receive(sent)
        return replace(received, rows=self.turns.after_forward(received.rows))

    @override
    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        return self.inner.send_back(self.turns.after_backward(outputs), dispatched)

    @override
    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        return self.turns.after_forward(self.inner.combine(returned))


@dataclass(frozen=True)
class LocalDispatcher(Dispatcher):
    """Dispatcher without communication: it sorts this rank's tokens by expert.

    Selections of experts of other ranks are ignored. Sizes are static, and nothing is copied from
    the device to the host.
    """

    local_experts: ShardRange
    limit: LayerRows | None = None

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        experts = sent.experts.wait()
        row_map = map_within(self.limit, experts, self.local_experts.start, self.local_experts.size)
        hidden = sent.hidden.wait()
        rows = permute_both(hidden, sent.probabilities.wait(), row_map)
        return ExpertInput(*rows, row_map, tokens=hidden.detach())

    @override
    def rows_recipe(self, dispatched: ExpertInput) -> Recipe | None:
        if dispatched.tokens is None:
            return None
        return Recipe.of(_sort_again, dispatched.tokens, *dispatched.row_map.tensors)


@dataclass(frozen=True)
class GatherDispatcher(OuterDispatcher):
    """Dispatcher that all-gathers the tokens of an axis and reduce-scatters the outputs.

    No token is dropped, for any routing. The ranks of the axis hold different tokens, in equal
    numbers. Over etp the ranks hold parts of the inner features of the same experts, so the sum
    over ranks is also the reduction that tensor parallelism needs. If the inner dispatcher, that of
    the gathered tokens, is a :class:`LocalDispatcher`, all sizes are static.

    Communication: ``send`` all-gathers tokens, probabilities and experts; its backward pass
        reduce-scatters the gradients of tokens and probabilities. ``combine`` reduce-scatters
        outputs; its backward pass all-gathers their gradients.
    """

    axis: MeshAxis

    @property
    @override
    def needs_equal_counts(self) -> bool:
        return True

    @override
    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        return TokensInTransit(
            start_all_gather_sequence(prepared.hidden, self.axis),
            start_all_gather_sequence(prepared.probabilities, self.axis),
            start_all_gather_sequence(prepared.experts, self.axis),
        )

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Wait for the gathered tokens, and give them to the inner dispatcher."""
        return self.inner.receive(
            self.inner.send(
                self.inner.prepare(
                    sent.hidden.wait(), sent.probabilities.wait(), sent.experts.wait()
                )
            )
        )

    @override
    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        """Sum the outputs of each token on this rank, then over all ranks."""
        return reduce_scatter_sequence(self.inner.combine(returned), self.axis)


@dataclass(frozen=True)
class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends one row for each selection to the rank of the selected expert.

    Only rows that an expert needs are sent, and no token is dropped. From :meth:`send` to
    :meth:`send_back` buffer sizes depend on the routing, so the host reads one small tensor from
    the device. Ranks may have different numbers of tokens.

    Communication: all over ep. ``prepare`` exchanges counts. ``send`` exchanges tokens and
        probabilities; its backward pass exchanges their gradients. ``send_back`` exchanges outputs;
        its backward pass exchanges their gradients.
    """

    num_experts: int
    axis: MeshAxis

    @property
    @override
    def is_static(self) -> bool:
        return False

    @override
    def prepare(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        probabilities: Float[Tensor, "tokens top_k"],
        experts: Int[Tensor, "tokens top_k"],
    ) -> PreparedTokens:
        """Exchange row counts, and sort the rows by expert."""
        row_map = map_rows(experts, 0, self.num_experts)
        sent = row_map.counts.view(self.axis.size, -1)
        one_per_rank = (1,) * self.axis.size
        received = all_to_all_rows(sent, one_per_rank, one_per_rank, self.axis)
        totals = torch.stack([sent.sum(1), received.sum(1)])
        counts = RowCounts(row_map, received, totals)
        return PreparedTokens(*permute_both(hidden, probabilities, row_map), experts, counts)

    @override
    def send(self, prepared: PreparedTokens) -> TokensInTransit:
        """Read row counts on the host, and start to send the rows."""
        counts = prepared.counts
        assert counts is not None, "`prepare` has counted the rows"
        sends, receives = counts.read()
        # Rows of selections that were dropped (-1) lie past those that are sent.
        rows, scales = (
            start_all_to_all_rows(_first_rows(tensor, sum(sends)), sends, receives, self.axis)
            for tensor in (prepared.hidden, prepared.probabilities)
        )
        # Rows arrive sorted by sending rank, then by expert: rebuild each row's expert index from
        # counts.
        num_here = counts.received.shape[1]
        numbers = torch.arange(num_here, device=counts.received.device).repeat(self.axis.size)
        experts = torch.repeat_interleave(
            numbers, counts.received.flatten(), output_size=sum(receives)
        )
        sizes = AllToAllSizes(counts.row_map, tuple(sends), tuple(receives))
        return TokensInTransit(rows, scales, InFlight(experts), sizes)

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Wait for the rows, and sort them by expert."""
        row_map = map_rows(sent.experts.wait().unsqueeze(1), 0, self.num_experts // self.axis.size)
        rows = sent.hidden.wait()
        scales = sent.probabilities.wait()
        return ExpertInput(*permute_both(rows, scales.unsqueeze(1), row_map), row_map, sent.sizes)

    @override
    def rows_recipe(self, dispatched: ExpertInput) -> None:
        """Return ``None``: the rows that have arrived are as many as the sorted ones."""

    @override
    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Send outputs back to the ranks of their tokens."""
        sizes = dispatched.sizes
        assert sizes is not None, "these rows came by an all-to-all"
        rows = unpermute(outputs, dispatched.row_map)
        back = all_to_all_rows(rows, sizes.receives, sizes.sends, self.axis)
        # With rows for dropped selections, which nothing reads, the size is static again.
        missing = sizes.row_map.num_rows - back.shape[0]
        return ExpertOutput(F.pad(back, (0, 0, 0, missing)) if missing else back, sizes.row_map)


@dataclass(frozen=True)
class OneSidedDispatcher(Dispatcher):
    """Dispatcher that puts each token into the memory of the ranks of its selected experts, once.

    Only the needed tokens are sent, no token is dropped, and nothing is copied from the device to
    the host. A token has the same row on every rank, so each buffer has room for the tokens of all
    ranks, and all ranks must have the same number of tokens and of experts. The puts run in
    :meth:`receive`, so computation between :meth:`send` and :meth:`receive` does not overlap with
    them.

    With places for clones the local experts are this rank's homes and places, and some tokens of
    busy experts go to clones, which all ranks plan alike. Probabilities stay those of the selected
    experts, so the router and its losses do not see the clones.

    Communication: ``receive`` puts tokens, probabilities and experts; its backward pass puts sums
        of gradients. ``combine`` puts sums of outputs; its backward pass puts gradients, and tokens
        again if the rows of experts were not kept. A barrier precedes and follows each transfer.
        Clones add no barriers: ``receive`` also puts counts and weights, its backward pass reads
        gradients of clones, and the backward pass of ``combine`` puts weights again.
    """

    local_experts: ShardRange
    transfer: PeerTransfer
    limit: LayerRows | None = None
    clones: PeerClones | None = None

    @property
    @override
    def needs_equal_counts(self) -> bool:
        return True

    @override
    def receive(self, sent: TokensInTransit) -> ExpertInput:
        """Put tokens into the memory of their experts' ranks, and sort the received tokens."""
        experts = sent.experts.wait()
        begun = None
        if self.clones is None:
            self.transfer.begin()
        else:
            experts, begun = self.clones.begin(experts)
        tokens = sent.hidden.wait()
        probabilities = sent.probabilities.wait()
        arrived = to_experts(
            tokens, probabilities, experts, self.local_experts, self.transfer, self.limit, begun
        )
        clones = None if begun is None else begun.clones
        kept = tokens.detach()
        return ExpertInput(*arrived, sent_experts=experts, clones=clones, tokens=kept)

    @override
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

    @override
    def send_back(
        self, outputs: Float[Tensor, "rows hidden"], dispatched: ExpertInput
    ) -> ExpertOutput:
        """Return the outputs unchanged; :meth:`combine` transfers their sums."""
        sent = dispatched.sent_experts
        return ExpertOutput(outputs, dispatched.row_map, sent, dispatched.clones, dispatched.tokens)

    @override
    def combine(self, returned: ExpertOutput) -> Float[Tensor, "tokens hidden"]:
        """Put sums of outputs into the memory of the tokens' ranks, and sum those of all ranks."""
        assert returned.sent_experts is not None, "these rows were put here"
        moved = None
        if self.clones is not None and returned.clones is not None:
            moved = PeerRound(self.clones, returned.clones)
        return from_experts(
            returned.rows,
            returned.row_map,
            returned.sent_experts,
            self.transfer,
            moved,
            returned.tokens,
        )


def _sort_again(tokens: Tensor, *map_tensors: Tensor) -> Tensor:
    return permute(tokens, RowMap(*map_tensors))


def _first_rows(rows: Tensor, number: int) -> Tensor:
    # A slice would cost a launch in the backward pass.
    return rows if rows.shape[0] == number else rows[:number]


def check_equal_counts(num_tokens: int, mesh: ParallelMesh) -> None:
    """Raise on all ranks if the ranks that gather each other's tokens have different token counts.

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
            "need equal parts. Pad sequences to one length, or use experts.transport='all_to_all' "
            "with etp=1."
        )
