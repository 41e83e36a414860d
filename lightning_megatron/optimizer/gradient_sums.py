"""Sums of gradients beside those of buckets: over tp, by rows of tables, and of tied weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_gather
from lightning_megatron.groups.shard_spec import ShardSpec
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.optimizer.gradient_buckets import GradientBucket
from lightning_megatron.optimizer.sharding import LATE_GROUP
from lightning_megatron.optimizer.shared_gradients import local_start, overlapping_pieces
from lightning_megatron.shapes import Float, Int, Shaped


class PartialSums:
    """Sums of partial gradients over the tensor axis, in one message for each dtype.

    Communication: one gather of ranges over tp, if there are partial parameters.
    """

    def __init__(self, specs: dict[str, ShardSpec], mesh: ParallelMesh) -> None:
        self._specs = specs
        self._mesh = mesh
        # Size and, if this rank has it, local start of each piece that several ranks have.
        self._pieces: dict[str, list[tuple[int, int | None]]] = {}
        if mesh.tp.size > 1 and specs:
            ranges = {name: _ranges_of(spec) for name, spec in specs.items()}
            ranges_by_rank = all_gather_objects(ranges, mesh.tp)
            for name, held in ranges.items():
                shared = overlapping_pieces([rank_ranges[name] for rank_ranges in ranges_by_rank])
                self._pieces[name] = [
                    (stop - start, local_start(held, start, stop)) for start, stop in shared
                ]

    def add(
        self, names: Collection[str], gradient_of: Callable[[str], Shaped[Tensor, "..."]]
    ) -> None:
        """Sum the named gradients over the tensor axis, in place.

        Communication: one all-reduce over tp for each dtype.
        """
        views = [
            _piece_of(gradient_of(name), self._specs[name].dim, size, start)
            for name, pieces in self._pieces.items()
            if name in names
            for size, start in pieces
        ]
        sum_slices_(views, self._mesh.tp)


def _ranges_of(spec: ShardSpec) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in spec.ranges]


def _piece_of(gradient: Tensor, dim: int, size: int, start: int | None) -> Tensor:
    """Return the view of a piece of a gradient, or zeros if this rank does not have the piece."""
    if not gradient.dim():
        return gradient
    if start is None:
        shape = gradient.shape
        return gradient.new_zeros(*shape[:dim], size, *shape[dim + 1 :])
    return gradient.narrow(dim, start, size)


def sum_slices_(slices: Sequence[Shaped[Tensor, "..."]], axis: MeshAxis) -> None:
    """Sum tensors over an axis, in place.

    Communication: one all-reduce over the axis for each dtype.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in slices:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = all_reduce_(torch.cat([tensor.reshape(-1) for tensor in tensors]), axis)
        sums = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            tensors, [total.view(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]
        )


class RowSums:
    """Choice of the tables whose gradients the ranks exchange by rows.

    The gradient of a token embedding is zero in the rows of all tokens that a step does not read.
    If the ranks read few rows, exchanging these takes less time than a reduction of the whole
    table. A table qualifies if its bucket contains nothing else and if all its gradients come with
    their rows. A tied embedding on the stage of the head therefore does not qualify.
    """

    def __init__(self, mesh: ParallelMesh, is_on: bool) -> None:
        self._mesh = mesh
        self._is_on = is_on and mesh.data.size > 1
        #: Whether the first gradient of each bucket had known rows on all ranks.
        self._qualifies: dict[GradientBucket, bool] = {}

    def start(self, bucket: GradientBucket, slots: Mapping[str, GradientSlot]) -> bool:
        """Start to average a bucket, complete here, by rows if all ranks find that faster.

        The result says whether the exchange has started; it is the same on all ranks.

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
        if is_late or bucket.buffer.sharding.is_expert or slot.gradient.dim() != 2:
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
        rows: Rows that may differ from zero, in any order and possibly repeated. All ranks must
            give the same number of rows.

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
