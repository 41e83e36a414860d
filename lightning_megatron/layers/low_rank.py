"""Trained products of two narrow matrices beside the weights of linear layers that are cut over the tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.random import StreamName
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.replicated import ReplicatedLinear
from lightning_megatron.plan.shards import ShardRange

Base: TypeAlias = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
"""A layer that can have updates of low rank."""

#: The purpose of the random numbers that are drawn here.
_PURPOSE = "low rank"


class LowRank(nn.Module):
    """Compute ``scale * dropout(x) A^T B^T``, which is added to some outputs of a linear layer.

    Equal to a LoRA layer of peft without its base. The factor at the side where the base is cut is cut as that is: of a
    column layer B by rows, of a row layer A by columns. The other one is whole, and what the ranks exchange is only as
    wide as the product's rank.

    Shapes: input as that of the base; output those of the base's outputs on this rank that are among ``rows``.

    Args:
        base: The layer that it belongs to.
        rows: The outputs (rows of the base's full weight).
        rank: Rows of A and columns of B.
        mesh: The groups and random streams of this rank.
        scale: What the product is multiplied by.
        dropout: Probability that an element of the input is dropped.

    Communication: that of ``column_linear`` or ``row_linear``, as the base, on tensors with ``rank`` features.
    Source: Hu et al. 2021.
    """

    def __init__(
        self, base: Base, rows: range, rank: int, mesh: ParallelMesh, *, scale: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.mesh, self.scale, self.dropout = mesh, scale, dropout
        spec = shard_spec_of(base.weight, mesh.tp.rank)
        num_columns, num_rows, before = spec.full_shape[1], len(rows), rows.start
        # What every rank computes alike draws alike; what ranks compute of different positions or features does not.
        self.stream: StreamName = "replicated"
        self.a: nn.Module
        self.b: nn.Module
        if isinstance(base, RowParallelLinear):
            self.stream = "tensor"
            self.a = RowParallelLinear(num_columns, rank, mesh, bias=False)
            self.b = ReplicatedLinear(rank, num_rows, mesh, bias=False, partial=mesh.sequence_parallel)
        else:
            is_column = isinstance(base, ColumnParallelLinear)
            partial = mesh.sequence_parallel if is_column else spec.partial
            self.stream = "tensor" if partial else "replicated"
            self.a = ReplicatedLinear(num_columns, rank, mesh, bias=False, partial=partial)
            if is_column:
                before, held = _size(_common(spec.ranges, range(rows.start))), _common(spec.ranges, rows)
                self.b = ColumnParallelLinear(rank, num_rows, mesh, bias=False, ranges=held, partial=spec.partial)
            else:
                self.b = ReplicatedLinear(rank, num_rows, mesh, bias=False, partial=partial)
        width = self.b.get_parameter("weight").shape[0]
        #: Which of the base's outputs on this rank it adds to.
        self.outputs = range(before, before + width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what is added to the outputs."""
        if self.training and self.dropout > 0.0:
            with self.mesh.random.fork(self.stream, _PURPOSE):
                hidden = F.dropout(hidden, self.dropout, training=True)
        product: Tensor = self.b(self.a(hidden.to(self.a.get_parameter("weight").dtype)))
        return product * self.scale

    def extra_repr(self) -> str:
        """Show what the factors do not."""
        return f"scale={self.scale:g}, dropout={self.dropout:g}"


class LowRankUpdates(nn.ModuleDict):
    """Hold the updates of a linear layer by name; no two add to the same outputs.

    Args:
        updates: The updates.
    """

    def __init__(self, updates: dict[str, LowRank]) -> None:
        super().__init__(updates)
        self.is_enabled = True

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Return the outputs of the layer with what is added to them.

        Args:
            hidden: The layer's input.
            output: The layer's outputs on this rank.
        """
        if not self.is_enabled:
            return output
        pieces, end = [], 0
        for update in self._in_order():
            outputs = update.outputs
            here = output[..., outputs.start : outputs.stop]
            pieces += [output[..., end : outputs.start], here + update(hidden).to(output.dtype)]
            end = outputs.stop
        pieces = [piece for piece in [*pieces, output[..., end:]] if piece.shape[-1]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def _in_order(self) -> list[LowRank]:
        updates = [update for update in self.values() if isinstance(update, LowRank)]
        return sorted(updates, key=lambda update: update.outputs.start)


def _common(ranges: Sequence[ShardRange], rows: range) -> list[ShardRange]:
    """Return the parts of ranges that are among some rows, counted from the first of these."""
    found = []
    for piece in ranges:
        start, stop = max(piece.start, rows.start), min(piece.stop, rows.stop)
        if start < stop:
            found.append(ShardRange(start - rows.start, stop - rows.start, piece.copy))
    return found


def _size(ranges: Iterable[ShardRange]) -> int:
    return sum(piece.size for piece in ranges)
