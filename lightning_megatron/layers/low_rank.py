"""Low-rank updates (LoRA) of linear layers that are sharded over the tensor axis."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.fused.dropout import drop_numbered, places_of
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parameters.parameter_stack import common_ranges
from lightning_megatron.layers.replicated import ReplicatedLinear
from lightning_megatron.plan.mask_numbers import MaskNumbers, dimension_of_rows
from lightning_megatron.shapes import Float, Shaped

Base: TypeAlias = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
"""A layer that supports low-rank updates."""


class LowRank(nn.Module):
    """Low-rank update ``scale * dropout(x) A^T B^T`` of some outputs of a linear layer.

    Equal to a LoRA layer of peft without its base layer. One factor is sharded like the base: the
    rows of B for a column layer, the columns of A for a row layer. Every rank holds the other
    factor in full, so only tensors with ``rank`` features are communicated.

    Shapes: the input is that of the base; the output has this rank's outputs of the base that are
        among ``rows``, the updated rows of the base's full weight.

    Communication: the same as the base (``column_linear`` or ``row_linear``), on tensors with
        ``rank`` features.
    Source: Hu et al. 2021.
    """

    def __init__(
        self,
        base: Base,
        rows: range,
        rank: int,
        mesh: ParallelMesh,
        *,
        scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.scale = scale
        self.dropout = dropout
        spec = shard_spec_of(base.weight, mesh.tp.rank)
        num_rows = len(rows)
        before = rows.start
        self.a: nn.Module
        self.b: nn.Module
        if isinstance(base, RowParallelLinear):
            self.a = RowParallelLinear(spec.full_shape[1], rank, mesh, bias=False)
            self.b = ReplicatedLinear(
                rank,
                num_rows,
                mesh,
                bias=False,
                partial=mesh.sequence_parallel,
            )
        else:
            is_column = isinstance(base, ColumnParallelLinear)
            partial = mesh.sequence_parallel if is_column else spec.partial
            self.a = ReplicatedLinear(spec.full_shape[1], rank, mesh, bias=False, partial=partial)
            if is_column:
                # Number of this rank's outputs before the updated ones, and this rank's updated
                # outputs.
                before = sum(piece.size for piece in common_ranges(spec.ranges, range(rows.start)))
                held = common_ranges(spec.ranges, rows)
                self.b = ColumnParallelLinear(
                    rank,
                    num_rows,
                    mesh,
                    bias=False,
                    ranges=held,
                    partial=spec.partial,
                )
            else:
                self.b = ReplicatedLinear(rank, num_rows, mesh, bias=False, partial=partial)
        #: Whether the inputs are this rank's features of all positions that its ranks of tp share.
        self.has_own_features = isinstance(base, RowParallelLinear)
        #: Updated outputs, as indices into this rank's outputs of the base.
        self.outputs = slice(before, before + len(self.b.get_parameter("weight")))

    def forward(self, hidden: Float[Tensor, "... in_local"]) -> Float[Tensor, "... out_local"]:
        if self.training and self.dropout > 0.0:
            numbers = self._numbers(hidden)
            hidden = drop_numbered(hidden, self.dropout, self.mesh, numbers, "low rank")
        inner = self.a(hidden.to(self.a.get_parameter("weight").dtype))
        # The scale costs least between the factors.
        update: Tensor = self.b(inner * self.scale)
        return update

    def _numbers(self, hidden: Tensor) -> MaskNumbers:
        shape = hidden.shape if hidden.dim() > 2 else (*hidden.shape[:1], 1, *hidden.shape[1:])
        own_features = self.mesh.tp.rank * shape[-1] if self.has_own_features else 0
        is_sharded = self.mesh.sequence_parallel and not self.has_own_features
        return MaskNumbers(
            dimension_of_rows(shape, 1),
            dimension_of_rows(shape, 0),
            cut=places_of(self.mesh, shape[0], is_sharded),
            first_feature=own_features,
        )

    @override
    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, dropout={self.dropout:g}"


class LowRankUpdates(nn.ModuleDict):
    """Low-rank updates of disjoint outputs of a linear layer, by name."""

    def __init__(self, updates: dict[str, LowRank]) -> None:
        super().__init__(updates)
        self.is_enabled = True

    def forward(
        self, hidden: Float[Tensor, "... in_local"], output: Float[Tensor, "*tokens out_local"]
    ) -> Float[Tensor, "*tokens out_local"]:
        if not self.is_enabled:
            return output
        updates = [update for update in self.values() if isinstance(update, LowRank)]
        for update, added in zip(updates, _values(updates, hidden), strict=True):
            output = _Added.apply(output, update.outputs, added.to(output.dtype))
        return output


def _values(updates: list[LowRank], hidden: Tensor) -> list[Tensor]:
    """Return the updates of an input, by one product for all first factors that are replicated."""
    factors = [update.a for update in updates if isinstance(update.a, ReplicatedLinear)]
    if len(factors) < len(updates) or any(one.training and one.dropout for one in updates):
        return [update(hidden) for update in updates]
    weight = torch.cat([factor.weight for factor in factors])
    inner = F.linear(hidden.to(weight.dtype), weight)
    parts = inner.split([len(factor.weight) for factor in factors], dim=-1)
    return [one.b(part * one.scale) for one, part in zip(updates, parts, strict=True)]


class _Added(torch.autograd.Function):
    """Sum of a layer's output and an update of some of its features, in the output's memory."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, place: slice, update: Tensor) -> Shaped[Tensor, "..."]:
        ctx.place = place
        # Autograd lets no function change outputs of another one that are views, such as those of
        # products over tp. A product keeps its inputs alone, so its output may be overwritten.
        output.detach()[..., place].add_(update)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Shaped[Tensor, "..."] | None, ...]:
        return grads[0], None, grads[0][..., ctx.place]
