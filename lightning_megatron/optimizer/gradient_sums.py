"""Sums of gradients beside those of buckets: over tp, by rows of tables, and of tied weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_gather
from lightning_megatron.groups.shard_spec import ShardSpec
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.optimizer.gradient_buckets import GradientBucket
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.optimizer.sharding import LATE_GROUP
from lightning_megatron.optimizer.shared_gradients import overlapping_pieces
from lightning_megatron.shapes import Float, Int, Shaped

GradientOf = Callable[[str], Tensor]


@dataclass(frozen=True)
class _Segment:
    """Segment of a gradient that several ranks have.

    Args:
        dim: Dimension along which the segment is cut; None for the full gradient.
        local_start: First index of the segment along ``dim`` in this rank's gradient; None if this
            rank does not have the segment.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    local_start: int | None = 0

    def of(self, gradient: Tensor) -> Tensor | None:
        """Return the view of this segment in a gradient; None if this rank does not have it."""
        if self.local_start is None:
            return None
        return (
            gradient
            if self.dim is None
            else gradient.narrow(self.dim, self.local_start, self.shape[self.dim])
        )


class PartialSums:
    """Sums of partial gradients over the tensor axis, in one message for each dtype.

    Communication: one gather of ranges over tp, if there are partial parameters.
    """

    def __init__(self, specs: dict[str, ShardSpec], mesh: ParallelMesh) -> None:
        self._specs = specs
        self._mesh = mesh
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        if mesh.tp.size > 1 and specs:
            ranges = {name: _ranges_of(spec) for name, spec in specs.items()}
            ranges_by_rank = all_gather_objects(ranges, mesh.tp)
            for name in ranges:
                held = [rank_ranges[name] for rank_ranges in ranges_by_rank]
                self._pieces[name] = overlapping_pieces(held)

    def add(self, names: Collection[str], gradient_of: GradientOf) -> None:
        """Sum the named gradients over the tensor axis, in place.

        Communication: one all-reduce over tp for each dtype.
        """
        segments = [
            segment
            for name in self._specs
            if name in names
            for segment in self._segments(name, gradient_of(name))
        ]
        by_dtype: dict[torch.dtype, list[_Segment]] = {}
        for segment in segments:
            by_dtype.setdefault(gradient_of(segment.name).dtype, []).append(segment)
        for dtype_segments in by_dtype.values():
            self._reduce(dtype_segments, gradient_of)

    def _segments(self, name: str, gradient: Tensor) -> Iterable[_Segment]:
        spec = self._specs[name]
        shape = tuple(gradient.shape)
        for start, stop in self._pieces.get(name, ()):
            local_start = None
            before = 0
            for held in spec.ranges:
                if held.start <= start and stop <= held.stop:
                    local_start = before + start - held.start
                before += held.size
            if shape:
                yield _Segment(
                    name,
                    (*shape[: spec.dim], stop - start, *shape[spec.dim + 1 :]),
                    spec.dim,
                    local_start,
                )
            else:
                yield _Segment(name, ())

    def _reduce(self, segments: Sequence[_Segment], gradient_of: GradientOf) -> None:
        local = [segment.of(gradient_of(segment.name)) for segment in segments]
        sizes = [prod(segment.shape) for segment in segments]
        flat = gradient_of(segments[0].name).new_zeros(sum(sizes))
        pairs = [
            (slot.view(segment.shape), view)
            for slot, segment, view in zip(flat.split(sizes), segments, local, strict=True)
            if view is not None
        ]
        inside = [slot for slot, _ in pairs]
        outside = [view for _, view in pairs]
        if pairs:
            torch._foreach_copy_(inside, outside)
        all_reduce_(flat, self._mesh.tp)
        if pairs:
            torch._foreach_copy_(outside, inside)


def _ranges_of(spec: ShardSpec) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in spec.ranges]


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


def add_ties_(
    main: MainParameters,
    buckets: Collection[GradientBucket],
    gradient_of: Callable[[str], Tensor],
    fill: Callable[[list[str]], None],
    *,
    own_bucket: bool,
) -> None:
    """Add the gradients of tied embeddings and of their copies on another stage, in place.

    A tied gradient that is alone in its bucket has the same layout on both stages, so each rank
    adds its part after the reduction over the data axis. Otherwise the whole gradients are added
    before that reduction.

    Args:
        own_bucket: Whether to add the gradients that are alone in their buckets, or the others.

    Communication: one all-reduce over the embedding axis for each tied embedding.
    """
    if not main.ties:
        return
    bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
    for name in (name for pair in main.ties for name in pair):
        bucket = bucket_of.get(name)
        if bucket is None or (name in main.planner.ties_alone) != own_bucket:
            continue
        fill([name])
        all_reduce_(bucket.own_part if own_bucket else gradient_of(name), main.mesh.embedding)
