"""The way of tokens to their experts and back: rows sorted by expert, and which row belongs to which choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.kernel_choice import fused_kernels


@dataclass(frozen=True)
class RowMap:
    """Say where the choices of tokens lie in a buffer of rows that is sorted by expert.

    Choice ``t * k + j`` is the j-th of token t. Rows of one expert keep the order of their choices. The buffer has as
    many rows as could be needed; those past the last end are of no expert here, and nothing reads them.

    Shapes: pairs ``(R)`` int64; rows ``(T, k)`` int64; ends ``(E)`` int32.

    Args:
        pairs: The choice that lies in every row.
        rows: The row of every choice; that of a choice whose expert is not here is past the last end, and may be past
            the buffer.
        ends: One past the last row of every expert here, on the device.
    """

    pairs: Tensor
    rows: Tensor
    ends: Tensor

    @property
    def top_k(self) -> int:
        """Count the choices of a token."""
        return self.rows.shape[1]

    @property
    def num_rows(self) -> int:
        """Count the rows of the buffer."""
        return self.pairs.shape[0]


def map_rows(experts: Tensor, first: int, num_experts: int) -> RowMap:
    """Sort the choices of tokens by expert.

    A token chooses an expert at most once. Choices of experts that are not here, and of no expert (-1), come last. All
    sizes follow from shapes, and nothing is read back from the device.

    Shapes: experts ``(T, k)``; the buffer has ``T min(k, E)`` rows.

    Args:
        experts: The experts that every token chose.
        first: The first expert here.
        num_experts: Experts here, E.
    """
    kernels = fused_kernels(experts)
    if kernels is None or num_experts > kernels.MAX_SORTED_EXPERTS:
        return sort_by_expert(experts, first, num_experts)
    pairs, rows, ends = kernels.sort_choices(experts, first, num_experts)
    return RowMap(pairs[: _num_rows(experts, num_experts)], rows, ends)


def sort_by_expert(experts: Tensor, first: int, num_experts: int) -> RowMap:
    """Do what :func:`map_rows` does by torch's operators."""
    local = experts.flatten() - first
    key = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    ordered, pairs = torch.sort(key, stable=True)
    rows = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(pairs.shape[0], device=pairs.device))
    numbers = torch.arange(num_experts, device=key.device, dtype=key.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return RowMap(pairs[: _num_rows(experts, num_experts)], rows.view_as(experts), ends)


def _num_rows(experts: Tensor, num_experts: int) -> int:
    num_tokens, top_k = experts.shape
    return num_tokens * min(top_k, num_experts)


def permute(hidden: Tensor, row_map: RowMap) -> Tensor:
    """Copy every token into the rows of its choices.

    Equal to ``hidden[row_map.pairs // k]`` before the last end. Rows past it are undefined and have no
    gradient.

    Shapes: hidden ``(T, D)``; output ``(R, D)``.
    """
    kernels = fused_kernels(hidden)
    if kernels is not None:
        return kernels.permute_tokens(hidden, None, row_map.rows, row_map.ends, row_map.num_rows)[0]
    return _ToRows.apply(hidden, row_map, row_map.top_k)


def permute_both(hidden: Tensor, probabilities: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
    """Copy every token, and the probabilities of its choices, into the rows of the choices, in one pass.

    Equal to :func:`permute` and :func:`permute_probabilities`.

    Shapes: hidden ``(T, D)``; probabilities ``(T, k)``; outputs ``(R, D)`` and ``(R)``.
    """
    kernels = fused_kernels(hidden)
    if kernels is not None:
        return kernels.permute_tokens(hidden, probabilities, row_map.rows, row_map.ends, row_map.num_rows)
    return permute(hidden, row_map), permute_probabilities(probabilities, row_map)


def permute_probabilities(probabilities: Tensor, row_map: RowMap) -> Tensor:
    """Copy the probability of every choice into its row.

    Equal to ``probabilities.flatten()[row_map.pairs]`` before the last end. Rows past it are undefined and have
    no gradient.

    Shapes: probabilities ``(T, k)``; output ``(R)``.
    """
    return _ToRows.apply(probabilities.flatten(), row_map, 1)


def unpermute(rows: Tensor, row_map: RowMap, probabilities: Tensor | None = None) -> Tensor:
    """Add up the rows of every token's choices, each times its probability if there are some.

    Choices of experts that are not here add nothing, whatever is in the rows past the last end.

    Shapes: rows ``(R, D)``; probabilities ``(T, k)``; output ``(T, D)`` in the dtype of rows.
    """
    kernels = fused_kernels(rows)
    if kernels is not None:
        return kernels.unpermute_rows(rows, probabilities, row_map.rows, row_map.ends)
    chosen = _FromRows.apply(rows, row_map).unflatten(0, row_map.rows.shape)
    if probabilities is not None:
        chosen = chosen * probabilities.unsqueeze(-1)
    return chosen.sum(1).to(rows.dtype)


class _ToRows(torch.autograd.Function):
    """Copy values, each of which so many neighbouring choices share, to the rows of the choices."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, row_map: RowMap, sharers: int) -> Tensor:
        ctx.row_map, ctx.sharers = row_map, sharers
        return values.index_select(0, row_map.pairs // sharers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chosen = read_choices(grads[0], ctx.row_map)
        return (chosen.unflatten(0, (-1, ctx.sharers)).sum(1) if ctx.sharers > 1 else chosen), None, None


class _FromRows(torch.autograd.Function):
    """Copy rows back to the order of choices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: RowMap) -> Tensor:
        ctx.row_map = row_map
        return read_choices(rows, row_map)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.row_map.pairs), None


def read_choices(rows: Tensor, row_map: RowMap) -> Tensor:
    """Read the row of every choice; zeros for choices of experts that are not here."""
    index = row_map.rows.flatten()
    if not rows.shape[0]:
        return rows.new_zeros((index.shape[0], *rows.shape[1:]))
    is_here = index < row_map.ends[-1]
    # Selected, not multiplied: rows of no expert may hold anything, NaN included.
    chosen = rows.index_select(0, index.clamp(max=rows.shape[0] - 1))
    return torch.where(is_here.view(-1, *[1] * (rows.dim() - 1)), chosen, 0)
