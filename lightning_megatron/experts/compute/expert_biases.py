"""Addition of the bias of each row's expert, for a number of rows that only the device knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    SlotRow,
    add_to_slots,
    cached_stack,
    slots_of,
)
from lightning_megatron.shapes import Bool, Float, Int


def add_expert_biases(
    rows: Float[Tensor, "rows features"],
    biases: Sequence[Float[Tensor, "_"]],
    ends: Int[Tensor, "experts"],
    factors: Float[Tensor, "rows"] | None = None,
    first_column: int = 0,
) -> Float[Tensor, "rows features"]:
    """Add to each row, in place, the bias of its expert times the row's factor (None: 1).

    Equal to ``rows[ends[e - 1]:ends[e]] += factors[ends[e - 1]:ends[e], None] * biases[e]`` for
    every expert ``e``, on the features from ``first_column`` on. Forward and backward are products
    with a membership matrix of rows and experts: one kernel each, whose order of summation is
    fixed. Rows past the last end are not changed, and their gradients are undefined and reach no
    bias.
    """
    if torch.compiler.is_compiling():
        return _compiled(rows, biases, ends, factors, first_column)
    return _AddBiases.apply(rows, factors, ends, first_column, *biases)


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        factors: Tensor | None,
        ends: Tensor,
        first_column: int,
        *biases: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(ends, factors, *biases)
        ctx.slots = slots_of(biases)
        ctx.columns = slice(first_column, first_column + len(biases[0]))
        ctx.mark_dirty(rows)
        shares = _shares(members(ends, len(rows)), factors, rows.dtype)
        return rows.addmm_(shares, _joined_biases(biases, ctx.slots, rows, first_column))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ends, factors, *biases = ctx.saved_tensors
        member = members(ends, len(grads[0]))
        # Rows past the last end may hold NaN, which a product with zero does not remove.
        is_row = member.any(-1, keepdim=True)
        grad = grads[0][:, ctx.columns].masked_fill(~is_row, 0)
        of_factors = None
        if ctx.needs_input_grad[1]:
            stack = _stacked(biases, ctx.slots).to(grad.dtype)
            of_factors = (_product(grad, stack.t()) * member).sum(-1).to(factors.dtype)
        needed = ctx.needs_input_grad[4:]
        of_biases: list[Tensor | None] = [None] * len(needed)
        if any(needed):
            sums = _product(_shares(member, factors, grad.dtype).t(), grad)
            of_biases = _hand_over(sums, biases, ctx.slots, needed)
        return grads[0], of_factors, None, None, *of_biases


def members(ends: Int[Tensor, "experts"], num_rows: int) -> Bool[Tensor, "{num_rows} experts"]:
    """Return the membership matrix of rows and experts; rows past the last end belong to none."""
    positions = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    # True from a row's own expert on.
    is_before = positions.unsqueeze(-1) < ends
    return is_before ^ F.pad(is_before[:, :-1], (1, 0))


def _shares(member: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the factor of each expert's bias in each row."""
    if factors is None:
        return member.to(dtype)
    return torch.where(member, factors.unsqueeze(-1), 0).to(dtype)


def _stacked(biases: Sequence[Tensor], slots: Sequence[GradientSlot | None]) -> Tensor:
    """Return biases as one tensor: a view if they have a constant stride, else a copy."""
    view = cached_stack(biases, slots)
    return torch.stack(tuple(biases)) if view is None else view


def _joined_biases(
    biases: Sequence[Tensor],
    slots: Sequence[GradientSlot | None],
    rows: Tensor,
    first_column: int,
) -> Tensor:
    """Return the biases as one tensor with a column for each feature."""
    stack = _stacked(biases, slots).to(rows.dtype)
    after = rows.shape[1] - first_column - stack.shape[1]
    return F.pad(stack, (first_column, after)) if first_column or after else stack


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; if the device supports it, the result is not rounded to a half type."""
    if left.is_cuda and left.dtype in HALF_TYPES:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _hand_over(
    sums: Tensor,
    biases: Sequence[Tensor],
    slots: Sequence[GradientSlot | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Add the gradients of biases to their slots, by one kernel if possible, or return them."""
    present = [slot for slot in slots if slot is not None]
    if len(present) == len(slots):
        row = SlotRow.of(present)

        def add(total: Tensor, overwrite: bool) -> None:
            if overwrite:
                total.copy_(sums).mul_(row.scale)
            else:
                total.add_(sums, alpha=row.scale)

        if row.add(add):
            return [None] * len(biases)
    return add_to_slots(sums, biases, slots, needed)


def _compiled(
    rows: Tensor,
    biases: Sequence[Tensor],
    ends: Tensor,
    factors: Tensor | None,
    first_column: int,
) -> Tensor:
    member = members(ends, len(rows))
    shares = _shares(member, factors, rows.dtype)
    no_slots = [None] * len(biases)
    total = torch.addmm(rows, shares, _joined_biases(biases, no_slots, rows, first_column))
    # The gradients of rows past the last end stay behind this choice.
    return torch.where(member.any(-1, keepdim=True), total, rows)
