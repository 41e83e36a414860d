"""Tokens on their way to the ranks that hold their experts, and sums of rows on their way back, by one-sided writes.

A rank writes a token once into the memory of every rank that holds experts that it chose, at the place that is the
token's there, so that nobody tells anybody how many come. Back go the sums over the experts of one rank, in the same
way. Each of the two is the backward pass of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.experts.permute import RowMap, map_rows, permute, permute_both, read_choices, unpermute
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_sequence, reduce_scatter_sequence
from lightning_megatron.groups.peer_memory import PeerRegion
from lightning_megatron.layers.kernel_choice import choose_kernels
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.plan.token_slots import TokenSlots


@dataclass(frozen=True)
class Slots:
    """View memory that ranks share as slots for the tokens of all of them.

    Shapes: rows ``(ep * T, D)``; scales and choices ``(ep * T, k)``.

    Args:
        region: The memory.
        layout: What lies where.
        rows: Features of tokens, or sums of rows.
        scales: Probabilities of choices, or their gradients; None where rows go alone.
        choices: The experts that tokens chose; None where rows go alone.
    """

    region: PeerRegion
    layout: TokenSlots
    rows: Tensor
    scales: Tensor | None
    choices: Tensor | None

    @classmethod
    def over(cls, axis: MeshAxis, rows: Tensor, scales: Tensor | None, experts: Tensor) -> Slots:
        """Lay out slots for such rows, scales and choices of every rank of an axis."""
        scale = 0 if scales is None else scales.element_size()
        layout = _lay_out(axis.size, *experts.shape, rows.shape[1], rows.element_size(), scale)
        region = axis.peer_memory.reserve(axis.group, layout.num_bytes, rows.device)
        features = region.view(0, (layout.count, layout.width), rows.dtype)
        if scales is None:
            return cls(region, layout, features, None, None)
        shape = (layout.count, layout.top_k)
        probabilities = region.view(layout.scales_at, shape, scales.dtype)
        return cls(region, layout, features, probabilities, region.view(layout.choices_at, shape, experts.dtype))


# Asked for in every transfer, of which a layer has four in a step. The number of tokens may differ from step to step.
@lru_cache(1024)
def _lay_out(num_ranks: int, num_tokens: int, top_k: int, width: int, element: int, scale: int) -> TokenSlots:
    return TokenSlots(
        num_ranks=num_ranks, num_tokens=num_tokens, width=width, top_k=top_k, element=element, scale=scale
    )


class PeerTransfer(Protocol):
    """Move tokens to the ranks of their experts, and sums back; autograd sees neither."""

    def spread(self, hidden: Tensor, probabilities: Tensor | None, experts: Tensor) -> Slots:
        """Return the slots for the tokens of all ranks, which the next transfer writes into.

        Features of tokens that chose no expert here are undefined.

        Shapes: hidden ``(T, D)``; probabilities and experts ``(T, k)``.
        """

    def collect(
        self, values: Tensor, scales: Tensor | None, row_map: RowMap, experts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Add up the rows of every token of this rank's, on all ranks, and gather what its probabilities got.

        Shapes: values ``(R, D)``; scales ``(R)``; experts ``(T, k)``; results ``(T, D)`` and ``(T, k)``.

        Args:
            values: Rows sorted by expert; those past the last end may hold anything.
            scales: A number for every row; None stands for none.
            row_map: Where the choices of the tokens of all ranks lie in the rows.
            experts: What this rank's tokens chose.
        """


@dataclass(frozen=True)
class Puts:
    """Write into the memory of the other GPUs.

    A rank waits for all others before it writes, because they may still read what the last transfer brought, and after
    it, because what they write may not have arrived. What a transfer brought is read, on the same stream, before the
    rank comes to the next one. So the memory belongs to one transfer at a time, and one is enough for all layers, both
    directions, both passes and whatever a graph repeats, as all ranks run the same transfers in the same order.

    Args:
        axis: The ranks.
        experts_each: Experts of each of them.
        kernels: The fused kernels.
    """

    axis: MeshAxis
    experts_each: int
    kernels: ModuleType

    def spread(self, hidden: Tensor, probabilities: Tensor | None, experts: Tensor) -> Slots:
        """Put every token where experts are that it chose, and what it chose everywhere."""
        slots = Slots.over(self.axis, hidden, probabilities, experts)
        if slots.layout.count:
            self.axis.note("put_tokens")
            slots.region.wait()
            where = slots.region.pointers, self.axis.rank, self.experts_each, slots.layout
            self.kernels.put_tokens(hidden, probabilities, experts, *where)
            slots.region.wait()
        return slots

    def collect(
        self, values: Tensor, scales: Tensor | None, row_map: RowMap, experts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Put the sum of every token's rows where the token is, and add up what comes."""
        slots = Slots.over(self.axis, values, scales, experts)
        if not slots.layout.count:
            return torch.empty_like(slots.rows), None if slots.scales is None else torch.empty_like(slots.scales)
        self.axis.note("put_sums")
        slots.region.wait()
        where = slots.region.pointers, self.axis.rank, slots.layout
        self.kernels.put_sums(values, scales, row_map.rows, row_map.ends, *where)
        slots.region.wait()
        return self.kernels.add_slots(slots.rows, slots.scales, experts, self.experts_each)


@dataclass(frozen=True)
class Collectives:
    """Do what :class:`Puts` does by an all-gather and a reduce-scatter, where nobody can write to others.

    What nobody would put is NaN here, so that who reads it is seen.

    Args:
        axis: The ranks.
        experts_each: Experts of each of them.
    """

    axis: MeshAxis
    experts_each: int

    def spread(self, hidden: Tensor, probabilities: Tensor | None, experts: Tensor) -> Slots:
        """Gather all tokens and what they chose."""
        slots = Slots.over(self.axis, hidden, probabilities, experts)
        chosen = all_gather_sequence(experts, self.axis)
        local = chosen - self.axis.rank * self.experts_each
        is_here = ((local >= 0) & (local < self.experts_each)).any(1, keepdim=True)
        slots.rows.copy_(torch.where(is_here, all_gather_sequence(hidden, self.axis), torch.nan))
        if probabilities is not None and slots.scales is not None and slots.choices is not None:
            slots.scales.copy_(all_gather_sequence(probabilities, self.axis))
            slots.choices.copy_(chosen)
        return slots

    def collect(
        self, values: Tensor, scales: Tensor | None, row_map: RowMap, experts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Add up the sums of all ranks."""
        result = reduce_scatter_sequence(unpermute(values, row_map), self.axis)
        if scales is None:
            return result, None
        return result, reduce_scatter_sequence(read_choices(scales, row_map).view(row_map.rows.shape), self.axis)


def transfer_over(axis: MeshAxis, experts_each: int, device: torch.device) -> PeerTransfer:
    """Return what moves tokens over an axis: writes between GPUs, collectives between CPUs.

    Raises:
        UnsupportedError: If the GPUs cannot write into each other's memory.

    Communication: that of :func:`why_no_puts`.
    """
    if device.type != "cuda":
        return Collectives(axis, experts_each)
    reason = why_no_puts(axis, device)
    if reason is not None:
        raise UnsupportedError(
            f"expert_transport ('one_sided') needs GPUs that write into each other's memory: {reason}. Tokens are put "
            "there without their ranks doing anything. Use 'all_gather', 'all_to_all' or 'auto'."
        )
    kernels = choose_kernels(device).kernels
    assert kernels is not None, "there would be a reason against puts"
    return Puts(axis, experts_each, kernels)


def why_no_puts(axis: MeshAxis, device: torch.device) -> str | None:
    """Say why ranks cannot put tokens into each other's memory, alike on all of them; None means that they can.

    Communication: on GPUs, at the first call for an axis, its ranks compare what they found.
    """
    choice = choose_kernels(device) if device.type == "cuda" else None
    missing = None if choice is None or choice.kernels is not None else choice.reason
    return axis.peer_memory.why_not(axis.group, device, missing)


def to_experts(
    hidden: Tensor, probabilities: Tensor, experts: Tensor, here: ShardRange, transfer: PeerTransfer
) -> tuple[Tensor, Tensor, RowMap]:
    """Bring tokens to the ranks of the experts that they chose, and sort them there by expert.

    Shapes: hidden ``(T, D)``; probabilities and experts ``(T, k)``; rows ``(R, D)``; their probabilities ``(R)``.

    Args:
        hidden: This rank's tokens.
        probabilities: Those of their choices.
        experts: The experts that they chose; -1 stands for none.
        here: The experts of this rank.
        transfer: What moves them.

    Returns:
        Rows of the tokens that came, their probabilities, and where the choices of the tokens of all ranks lie there.
    """
    return _ToExperts.apply(hidden, probabilities, experts, here, transfer)


def from_experts(outputs: Tensor, row_map: RowMap, experts: Tensor, transfer: PeerTransfer) -> Tensor:
    """Bring the sums of every token's rows back to the rank of the token, and add up those of all ranks.

    Shapes: outputs ``(R, D)``; experts ``(T, k)``; result ``(T, D)``.

    Args:
        outputs: What experts made of the rows.
        row_map: Where the choices of the tokens of all ranks lie in them.
        experts: What this rank's tokens chose.
        transfer: What moves them.
    """
    return _FromExperts.apply(outputs, row_map, experts, transfer)


class _ToExperts(torch.autograd.Function):
    """Spread tokens and sort them; backward collect their gradients. What others write into is read in here alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, probabilities: Tensor, experts: Tensor, here: ShardRange, transfer: PeerTransfer
    ) -> tuple[Tensor, Tensor, RowMap]:
        slots = transfer.spread(hidden, probabilities, experts)
        assert slots.scales is not None, "probabilities were sent"
        assert slots.choices is not None, "choices were sent"
        row_map = map_rows(slots.choices, here.start, here.size)
        ctx.save_for_backward(experts)
        ctx.row_map, ctx.transfer = row_map, transfer
        return *permute_both(slots.rows, slots.scales, row_map), row_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (experts,) = ctx.saved_tensors
        return *ctx.transfer.collect(grads[0], grads[1], ctx.row_map, experts), None, None, None


class _FromExperts(torch.autograd.Function):
    """Collect sums; backward spread their gradients to the rows."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, row_map: RowMap, experts: Tensor, transfer: PeerTransfer) -> Tensor:
        ctx.save_for_backward(experts)
        ctx.row_map, ctx.transfer = row_map, transfer
        return transfer.collect(outputs, None, row_map, experts)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (experts,) = ctx.saved_tensors
        return permute(ctx.transfer.spread(grads[0], None, experts).rows, ctx.row_map), None, None, None
