"""Means over the data-parallel ranks of embedding gradients with few nonzero rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_gather
from lightning_megatron.layers.gradient_slot import GradientSlot
from lightning_megatron.shapes import Float, Int
from lightning_megatron.training.buffer_planner import LATE_GROUP
from lightning_megatron.training.gradient_bucket import GradientBucket


class RowSums:
    """Choice of the tables whose gradients the ranks exchange by rows.

    The gradient of a token embedding is zero in the rows of all tokens that a step does not read.
    If the ranks read few rows, exchanging these takes less time than a reduction of the whole
    table. A table qualifies if its bucket contains nothing else and if all its gradients come with
    their rows. A tied embedding on the stage of the head therefore does not qualify.

    Args:
        mesh: Process groups of this rank.
        is_on: Whether any table is exchanged by rows.
    """

    def __init__(self, mesh: ParallelMesh, is_on: bool) -> None:
        self._mesh = mesh
        self._is_on = is_on and mesh.data.size > 1
        #: Whether the first gradient of each bucket had known rows on all ranks.
        self._qualifies: dict[GradientBucket, bool] = {}

    def start(self, bucket: GradientBucket, slots: Mapping[str, GradientSlot]) -> bool:
        """Start to average the gradient of a bucket by rows, if that takes less time.

        Args:
            bucket: Bucket whose gradients are complete on this rank.
            slots: Gradient slots by the names of their parameters.

        Returns:
            Whether the exchange has started; the same on all ranks.

        Communication: one all-reduce of a number over the data axis on the CPU, if the table
            qualified in the first step, and that of :func:`start_row_sum`.
        """
        is_open = self._is_on and len(bucket.names) == 1
        if not is_open or not self._qualifies.get(bucket, True):
            return False
        data = self._mesh.data
        slot = slots[bucket.names[0]]
        # Sums over other axes have added further rows to the gradients of the late group.
        is_late = bucket.group == LATE_GROUP
        if is_late or bucket.buffer.is_expert or slot.gradient.dim() != 2:
            return False
        num_rows = slot.gradient.shape[0]
        rows = slot.rows
        # A gradient without known rows counts as a gradient of all rows.
        count = num_rows if rows is None else sum(indices.numel() for indices in rows)
        agreed = int(all_reduce_(torch.tensor(count), self._mesh.data_cpu, "max"))
        self._qualifies.setdefault(bucket, agreed < num_rows)
        # Each rank receives the rows of all ranks, and then reads and writes them to add them.
        if rows is None or 2 * agreed * data.size > num_rows:
            return False
        padding = slot.gradient.new_zeros(agreed - count, dtype=torch.long)
        bucket.pending = start_row_sum(slot.gradient, torch.cat([*rows, padding]), data)
        return True


def start_row_sum(
    gradient: Float[Tensor, "vocab_local hidden"], rows: Int[Tensor, "rows"], axis: MeshAxis
) -> Pending:
    """Start to average a gradient over the ranks in place, by an exchange of its nonzero rows.

    Equal to ``start_all_reduce(gradient, axis, "mean")`` if the gradient is zero in all other rows.
    The ranks add in the same order, so that all of them get the same bits.

    Args:
        gradient: Gradient of a table.
        rows: Rows that may differ from zero, in any order and possibly repeated. All ranks must
            give the same number of rows.
        axis: Ranks that have the same table.

    Communication: two all-gathers, of the indices and of the rows.
    """
    local_rows = rows.sort().values
    # A row is sent once, and zeros take the place of its repetitions.
    is_repeated = torch.zeros_like(local_rows, dtype=torch.bool)
    torch.eq(local_rows[1:], local_rows[:-1], out=is_repeated[1:])
    values = gradient[local_rows].masked_fill_(is_repeated[:, None], 0.0)
    all_rows = local_rows.new_empty(axis.size * len(local_rows))
    all_values = values.new_empty(len(all_rows), *values.shape[1:])
    arriving = [
        start_all_gather(all_rows, local_rows, axis),
        start_all_gather(all_values, values, axis),
    ]

    def finish() -> None:
        for gather in arriving:
            gather.wait()
        gradient.index_fill_(0, local_rows, 0.0)
        _add_in_turn(gradient, all_rows.chunk(axis.size), all_values.chunk(axis.size))

    return Pending(after=finish)


def _add_in_turn(gradient: Tensor, rows: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add the mean of the rows rank by rank, so that all ranks get the same bits.

    Repetitions of a row of one rank are zeros, so the order within a rank does not matter.
    """
    for rank_rows, rank_values in zip(rows, values, strict=True):
        gradient.index_add_(0, rank_rows, rank_values, alpha=1 / len(rows))
