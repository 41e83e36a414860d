"""How tokens come to the ranks that hold their experts, and what the experts made of them back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.experts.permute import RowMap, map_rows, permute_both, unpermute
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_, exchange_rows, reduce_scatter_sequence
from lightning_megatron.groups.in_flight import InFlight, start_all_gather_sequence, start_row_exchange
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.shards import ShardRange


@dataclass(frozen=True)
class Exchange:
    """Say which rows went where in an all-to-all.

    Args:
        row_map: Where the choices of this rank's tokens lie in the rows that it sent, sorted by expert.
        sends: Rows that it sent to every rank.
        receives: Rows that every rank sent to it.
    """

    row_map: RowMap
    sends: tuple[int, ...]
    receives: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """Hold tokens on their way to the ranks of their experts.

    Shapes: of what arrives: hidden ``(N, D)``; probabilities and experts ``(N, k)``.

    Args:
        hidden: The tokens.
        probabilities: What the outputs of the experts are multiplied by.
        experts: Numbers of the experts, as the ranks count them that the tokens go to.
        exchange: How they go, if by an all-to-all.
    """

    hidden: InFlight
    probabilities: InFlight
    experts: InFlight
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Dispatched:
    """Hold what the experts of this rank compute on.

    Shapes: rows ``(R, D)``; probabilities ``(R)``; ends ``(E/ep)`` int32 on the device.

    Args:
        rows: Tokens sorted by expert; those past the last end are of no expert.
        probabilities: What every row's output is multiplied by.
        row_map: Where the choices of the tokens that came here lie in the rows.
        exchange: How they came, if by an all-to-all.
        choices: What the tokens of this rank chose, if they were put where their experts are.
    """

    rows: Tensor
    probabilities: Tensor
    row_map: RowMap
    exchange: Exchange | None = None
    choices: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        """Return one past the last row of every expert here."""
        return self.row_map.ends


class Dispatcher(Protocol):
    """Bring tokens to experts and back; nothing is kept between the calls but what they return.

    What is computed between :meth:`send` and :meth:`receive` runs beside the communication, forward and backward.
    """

    @property
    def is_static(self) -> bool:
        """Tell whether sizes follow from those of the inputs, and nothing is read back from the device."""

    @property
    def needs_equal_counts(self) -> bool:
        """Tell whether its ranks must have equally many tokens."""

    def send(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Sent:
        """Start to bring every token to the experts that it chose.

        Shapes: hidden ``(T, D)``; probabilities and experts ``(T, k)``.

        Args:
            hidden: This rank's tokens.
            probabilities: What the outputs of the chosen experts are multiplied by.
            experts: Numbers of the chosen experts in the whole layer; -1 stands for none.
        """

    def receive(self, sent: Sent) -> Dispatched:
        """Wait for the tokens that come to the experts of this rank, and sort them by expert."""

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring outputs, already times their probabilities, back to the tokens and add them up.

        Shapes: outputs ``(R, D)``, undefined past the last end; result ``(T, D)``.
        """


@dataclass(frozen=True)
class LocalDispatcher:
    """Sort tokens by expert; they stay where they are.

    Sizes are static, and nothing is read back from the device.

    Args:
        here: The experts of this rank; what a token chose beside them adds nothing.
    """

    here: ShardRange

    @property
    def is_static(self) -> bool:
        """Tell that it is."""
        return True

    @property
    def needs_equal_counts(self) -> bool:
        """Tell that other ranks do not matter."""
        return False

    def send(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Sent:
        """Leave the tokens where they are."""
        return Sent(InFlight(hidden), InFlight(probabilities), InFlight(experts))

    def receive(self, sent: Sent) -> Dispatched:
        """Sort the tokens that chose experts of this rank."""
        row_map = map_rows(sent.experts.wait(), self.here.start, self.here.size)
        return Dispatched(*permute_both(sent.hidden.wait(), sent.probabilities.wait(), row_map), row_map)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Add up the outputs of every token."""
        return unpermute(outputs, dispatched.row_map)


@dataclass(frozen=True)
class GatherDispatcher:
    """Give every rank the tokens of all, and add up what each made of them.

    No token is dropped whatever the routing is. The ranks of the axis hold different tokens, equally many. Over etp,
    whose ranks hold parts of the inner features of the same experts, the sum of what ranks made of a token is the sum
    that tensor parallelism needs.

    Args:
        inner: What becomes of the tokens of all. If it is a :class:`LocalDispatcher`, sizes are static and nothing is
            read back from the device.
        axis: Over which tokens are gathered.

    Communication: send all-gathers tokens, probabilities and experts, backward it reduce-scatters the gradients of
        the former two; combine reduce-scatters outputs, backward it all-gathers their gradients.
    """

    inner: Dispatcher
    axis: MeshAxis

    @property
    def is_static(self) -> bool:
        """Tell whether what becomes of the tokens of all is."""
        return self.inner.is_static

    @property
    def needs_equal_counts(self) -> bool:
        """Tell that an all-gather takes equal parts."""
        return True

    def send(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Sent:
        """Start to gather all tokens."""
        return Sent(
            start_all_gather_sequence(hidden, self.axis),
            start_all_gather_sequence(probabilities, self.axis),
            start_all_gather_sequence(experts, self.axis),
        )

    def receive(self, sent: Sent) -> Dispatched:
        """Pass the tokens of all on."""
        gathered = sent.hidden.wait(), sent.probabilities.wait(), sent.experts.wait()
        return self.inner.receive(self.inner.send(*gathered))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Add up this rank's outputs of every token, then those of all ranks."""
        return reduce_scatter_sequence(self.inner.combine(outputs, dispatched), self.axis)


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Send every token to the ranks of the experts that it chose, once for each of them.

    Nothing is sent in vain and no token is dropped, but buffers have the sizes of this very routing, for which the host
    reads one small tensor back. Ranks may have different numbers of tokens.

    Args:
        num_experts: Experts of the layer.
        axis: The ranks that share them in equal parts (ep).

    Communication: send exchanges counts, tokens and probabilities, backward the gradients of the latter two;
        combine exchanges outputs, backward their gradients.
    """

    num_experts: int
    axis: MeshAxis

    @property
    def is_static(self) -> bool:
        """Tell that it is not."""
        return False

    @property
    def needs_equal_counts(self) -> bool:
        """Tell that ranks tell each other how many rows they send."""
        return False

    def send(self, hidden: Tensor, probabilities: Tensor, experts: Tensor) -> Sent:
        """Start to send tokens to their experts, once the host knows how many go where."""
        leaving = map_rows(experts, 0, self.num_experts)
        counts = torch.diff(leaving.ends, prepend=leaving.ends.new_zeros(1)).view(self.axis.size, -1)
        one_each = (1,) * self.axis.size
        arriving = exchange_rows(counts, one_each, one_each, self.axis)
        sends, receives = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        # Now the host knows how many rows there are.
        leaving = replace(leaving, pairs=leaving.pairs[: sum(sends)])
        rows, scales = (
            start_row_exchange(tensor, sends, receives, self.axis)
            for tensor in permute_both(hidden, probabilities, leaving)
        )
        # They come sorted by rank, then by expert.
        num_here = counts.shape[1]
        numbers = torch.arange(num_here, device=counts.device).repeat(self.axis.size)
        found = torch.repeat_interleave(numbers, arriving.flatten(), output_size=sum(receives))
        return Sent(rows, scales, InFlight(found), Exchange(leaving, tuple(sends), tuple(receives)))

    def receive(self, sent: Sent) -> Dispatched:
        """Sort the tokens that came by expert."""
        row_map = map_rows(sent.experts.wait().unsqueeze(1), 0, self.num_experts // self.axis.size)
        rows, scales = sent.hidden.wait(), sent.probabilities.wait()
        return Dispatched(*permute_both(rows, scales.unsqueeze(1), row_map), row_map, sent.exchange)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Send outputs back and add up those of every token."""
        exchange = dispatched.exchange
        assert exchange is not None, "these rows came by an all-to-all"
        rows = unpermute(outputs, dispatched.row_map)
        return unpermute(exchange_rows(rows, exchange.receives, exchange.sends, self.axis), exchange.row_map)


def check_equal_counts(num_tokens: int, mesh: ParallelMesh) -> None:
    """Refuse microbatches of different sizes on the ranks that gather each other's tokens, on all of them.

    Args:
        num_tokens: Tokens of this rank's microbatch (tokens).
        mesh: The groups of this rank.

    Raises:
        RankMismatchError: If they differ.

    Communication: an all-reduce on the CPU over the ranks that hold all experts of a stage together.
    """
    smallest, largest = all_reduce_(torch.tensor([-num_tokens, num_tokens]), mesh.experts_cpu, "max").tolist()
    if -smallest != largest:
        raise RankMismatchError(
            f"the ranks that share experts must have equally many tokens in a microbatch: this rank has {num_tokens}, "
            f"the others from {-smallest} to {largest}. An all-gather and puts take equal parts. Pad sequences to one "
            "length, or use expert_transport='all_to_all' with etp 1."
        )
