"""Permutation of tokens into rows sorted by expert, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class RowMap:
    """Map between the selections of tokens and the rows of a buffer that is sorted by expert.

    Selection ``t * k + j`` is the j-th selection of token t. The rows of one expert keep the order
    of their selections. The buffer has the largest number of rows that any routing needs, or fewer
    under a limit. Rows past the last end belong to no local expert, and nothing reads them.
    The ends and the needed rows are int32, the other tensors int64; all are on the device.

    Args:
        pairs: Index of the selection in each row.
        rows: Index of the row of each selection. For experts of other ranks, and for selections
            beyond a limit, it lies past the last end, and may lie past the buffer.
        ends: Index one past the last row of each local expert.
        needed: Number of selections of local experts: the last end, or more if a limit has
            excluded some.
    """

    pairs: Int[Tensor, "rows"]
    rows: Int[Tensor, "tokens top_k"]
    ends: Int[Tensor, "experts"]
    needed: Int[Tensor, "1"]

    @property
    def tensors(
        self,
    ) -> tuple[
        Int[Tensor, "rows"],
        Int[Tensor, "tokens top_k"],
        Int[Tensor, "experts"],
        Int[Tensor, "1"],
    ]:
        """Return all tensors in order, for ``save_for_backward``.

        An autograd function that kept the map itself would read the map of the first forward pass
        after a recomputation, and keep it in memory until then.
        """
        return self.pairs, self.rows, self.ends, self.needed

    @property
    def top_k(self) -> int:
        """Return the number of selections of each token."""
        return self.rows.shape[1]

    @property
    def counts(self) -> Int[Tensor, "experts"]:
        """Return the number of rows of each local expert."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the buffer."""
        return self.pairs.shape[0]


def map_rows(
    experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int, limit: int | None = None
) -> RowMap:
    """Sort the selections of tokens by expert.

    An expert is selected for a token at most once. Selections of experts of other ranks, and of no
    expert (-1), come last; those beyond a limit have no row. All sizes follow from shapes, and
    nothing is copied from the device to the host. ``first`` and ``num_experts`` are the local
    experts.

    Shapes: the buffer has ``tokens * min(top_k, num_experts)`` rows, and at most ``limit``.
    """
    kernels = fused_kernels(experts)
    if kernels is None or num_experts > kernels.MAX_SORTED_EXPERTS:
        return sort_by_expert(experts, first, num_experts, limit)
    return _within(limit, *kernels.sort_selections(experts, first, num_experts))


def sort_by_expert(
    experts: Int[Tensor, "tokens top_k"], first: int, num_experts: int, limit: int | None = None
) -> RowMap:
    """Sort the selections of tokens by expert with operators of torch, as :func:`map_rows` does."""
    local = experts.flatten() - first
    key = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    ordered, pairs = torch.sort(key, stable=True)
    rows = torch.empty_like(pairs).scatter_(
        0, pairs, torch.arange(pairs.shape[0], device=pairs.device)
    )
    numbers = torch.arange(num_experts, device=key.device, dtype=key.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return _within(limit, pairs, rows.view_as(experts), ends)


def _within(limit: int | None, pairs: Tensor, rows: Tensor, ends: Tensor) -> RowMap:
    """Return the map for a buffer of the rows of the worst routing, or of fewer."""
    num_tokens, top_k = rows.shape
    num_rows = num_tokens * min(top_k, ends.shape[0])
    needed = ends[-1:]
    if limit is not None and limit < num_rows:
        num_rows = limit
        # Readers compare rows with ends, so selections beyond the limit belong to no expert.
        ends = ends.clamp(max=limit)
    return RowMap(pairs[:num_rows], rows, ends, needed)


def permute(
    hidden: Float[Tensor, "tokens hidden"], row_map: RowMap
) -> Float[Tensor, "rows hidden"]:
    """Copy each token into the rows of its selections.

    Equal to ``hidden[row_map.pairs // k]`` before the last end. Rows past it are undefined and have
    no gradient.
    """
    kernels = fused_kernels(hidden)
    if kernels is not None:
        return kernels.permute_tokens(hidden, None, row_map.rows, row_map.ends, row_map.num_rows)[0]
    return _ToRows.apply(hidden, row_map, row_map.top_k)


def permute_both(
    hidden: Float[Tensor, "tokens hidden"],
    probabilities: Float[Tensor, "tokens top_k"],
    row_map: RowMap,
) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows"]]:
    """Copy both in one pass. Equal to :func:`permute` and :func:`permute_probabilities`."""
    kernels = fused_kernels(hidden)
    if kernels is not None:
        return kernels.permute_tokens(
            hidden, probabilities, row_map.rows, row_map.ends, row_map.num_rows
        )
    return permute(hidden, row_map), permute_probabilities(probabilities, row_map)


def permute_probabilities(
    probabilities: Float[Tensor, "tokens top_k"], row_map: RowMap
) -> Float[Tensor, "rows"]:
    """Copy the probability of each selection into its row.

    Equal to ``probabilities.flatten()[row_map.pairs]`` before the last end. Rows past it are
    undefined and have no gradient.
    """
    return _ToRows.apply(probabilities.flatten(), row_map, 1)


def unpermute(
    rows: Float[Tensor, "rows hidden"], row_map: RowMap
) -> Float[Tensor, "tokens hidden"]:
    """Sum the rows of each token's selections.

    Selections of experts of other ranks add nothing, whatever values the rows past the last end
    have. The output has the dtype of the rows.
    """
    kernels = fused_kernels(rows)
    if kernels is not None:
        return kernels.unpermute_rows(rows, row_map.rows, row_map.ends)
    return _FromRows.apply(rows, row_map).unflatten(0, row_map.rows.shape).sum(1)


class _ToRows(torch.autograd.Function):
    """Copy values to the rows of selections; ``sharers`` consecutive selections share one value."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, row_map: RowMap, sharers: int) -> Tensor:
        ctx.save_for_backward(*row_map.tensors)
        ctx.sharers = sharers
        return values.index_select(0, row_map.pairs // sharers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        selected = read_selections(grads[0], RowMap(*ctx.saved_tensors))
        return (
            (selected.unflatten(0, (-1, ctx.sharers)).sum(1) if ctx.sharers > 1 else selected),
            None,
            None,
        )


class _FromRows(torch.autograd.Function):
    """Copy rows back into the order of the selections."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_map: RowMap) -> Tensor:
        ctx.save_for_backward(*row_map.tensors)
        return read_selections(rows, row_map)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, RowMap(*ctx.saved_tensors).pairs), None


def read_selections(
    rows: Float[Tensor, "rows *features"], row_map: RowMap
) -> Float[Tensor, "selections *features"]:
    """Return the row of each selection, with zeros for selections of experts of other ranks."""
    index = row_map.rows.flatten()
    if not rows.shape[0]:
        return rows.new_zeros((index.shape[0], *rows.shape[1:]))
    is_here = index < row_map.ends[-1]
    # Rows are selected instead of multiplied by zero, because rows of no expert may be NaN.
    selected = rows.index_select(0, index.clamp(max=rows.shape[0] - 1))
    return torch.where(is_here.view(-1, *[1] * (rows.dim() - 1)), selected, 0)
