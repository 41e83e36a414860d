"""Buckets of gradients and when their reductions start, and sums beside those of buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_gather
from lightning_megatron.groups.shard_spec import ShardSpec
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.optimizer.flat_buffer import FlatBuffer, UseOrder
from lightning_megatron.optimizer.sharding import LATE_GROUP
from lightning_megatron.shapes import Float, Int, Shaped


@dataclass(eq=False)
class GradientBucket:
    """State of one bucket during a step.

    Args:
        missing: Names of parameters whose gradients are incomplete while the last backward pass
            runs.
        pending: Reduction over the data-parallel ranks, once it has started.
        is_summed: Whether the gradients are already summed over all axes, instead of only over the
            data-parallel ranks.
    """

    buffer: FlatBuffer
    index: int
    names: tuple[str, ...]
    missing: set[str]
    pending: Pending | None = None
    is_summed: bool = False

    @classmethod
    def of(cls, buffer: FlatBuffer, index: int) -> GradientBucket:
        """Return a bucket of a buffer."""
        return cls(
            buffer, index, tuple(placed.name for placed in buffer.plan.buckets[index].placed), set()
        )

    @property
    def group(self) -> int:
        """Return the group of buckets whose gradients are complete at the same time."""
        return self.buffer.plan.buckets[self.index].group

    def start(self, mesh: ParallelMesh, is_whole: bool) -> None:
        """Start to average the gradients; each rank gets the whole bucket if ``is_whole``.

        Communication: that of :meth:`Zero1Sharding.start_reduction`.
        """
        self.pending = self.buffer.sharding.start_reduction(
            self.buffer.gradients, self.index, mesh, is_whole
        )

    def wait(self) -> None:
        """Wait for the reduction, if it has started."""
        if self.pending is not None:
            self.pending.wait()

    @property
    def own_part(self) -> Shaped[Tensor, "_"]:
        """Return this rank's part of the gradients."""
        return self.buffer.sharding.own_part(self.buffer.gradients, self.index)


class BucketStarts:
    """Tracker that starts the reduction of each bucket when its last gradient has arrived.

    The reductions must start in the same order on all ranks, so a complete bucket waits for the
    buckets before it in its group.
    """

    def __init__(self, start: Callable[[GradientBucket], None], order: UseOrder) -> None:
        self._start = start
        self._order = order
        #: All buckets, group by group. Within a group, buckets of all buffers are in the order in
        #: which a backward pass completes them.
        self.buckets: list[GradientBucket] = []
        #: Bucket of each parameter.
        self.bucket_of: dict[str, GradientBucket] = {}
        self._armed: set[int] = set()
        self._num_arrived: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._num_left: Mapping[str, int] | None = None

    def add(self, buckets: Iterable[GradientBucket]) -> None:
        """Add the buckets of a buffer."""
        new = list(buckets)
        self.bucket_of |= {name: bucket for bucket in new for name in bucket.names}
        # Every rank starts the buckets in this order.
        self.buckets = sorted([*self.buckets, *new], key=self._sort_key)

    def begin_last(self, chunk: int, left: Mapping[str, int] | None = None) -> None:
        """Expect the last backward pass of a chunk, or its last weight half with ``left``.

        A weight half is the part of a split backward pass that computes weight gradients; ``left``
        counts those that it will add to each parameter. Buckets that are complete already start.
        """
        self._armed.add(chunk)
        self._num_left = left
        for bucket in self._in_group(chunk):
            bucket.missing = set(bucket.names if left is None else left.keys() & bucket.names)
            self._num_arrived |= dict.fromkeys(bucket.names, 0)
        if left is not None:
            self._start_group(chunk)

    def start_all(self, chunk: int) -> None:
        """Start all buckets of a chunk, whose gradients are complete."""
        if chunk in self._armed:
            self._armed.discard(chunk)
            for bucket in self._in_group(chunk) if self._num_left is None else ():
                self._expected |= {
                    name: max(self._num_arrived[name], self._expected.get(name, 0))
                    for name in bucket.names
                }
        for bucket in self._in_group(chunk):
            self._start(bucket)

    @contextmanager
    def preserve_counts(self) -> Iterator[None]:
        """Restore the numbers of expected and counted gradients when the block ends."""
        armed = set(self._armed)
        num_arrived = dict(self._num_arrived)
        expected = dict(self._expected)
        left = self._num_left
        try:
            yield
        finally:
            self._armed = armed
            self._num_arrived = num_arrived
            self._expected = expected
            self._num_left = left

    def end(self) -> None:
        """Expect no further gradients in this step."""
        self._armed.clear()

    def mark_arrived(self, names: Sequence[str]) -> None:
        """Count gradients that arrived together, and start the buckets that are complete now."""
        # This runs in the backward pass, once for each gradient of each microbatch.
        num_arrived = self._num_arrived
        touched = set(map(self.bucket_of.__getitem__, names))
        # A parameter that the model uses several times gets several gradients. Its bucket starts
        # after as many gradients as in earlier steps, so one more gradient would come too late.
        if any(bucket.pending is not None for bucket in touched):
            name = next(name for name in names if self.bucket_of[name].pending is not None)
            raise RuntimeError(
                "a parameter's gradient must be complete when its sum over the ranks starts: "
                f"{name!r} received a second gradient afterwards, because the model uses it more "
                "often than in earlier steps. Use optimizer.overlap_gradients=False."
            )
        for name in names:
            num_arrived[name] = num_arrived.get(name, 0) + 1
        # Only the last backward pass of a step completes gradients; `_armed` lists its chunks.
        if self._armed:
            self._start_complete_groups(names, touched)

    def _sort_key(self, bucket: GradientBucket) -> tuple[int, int]:
        """Return the sort key: parameters used first get their gradients last."""
        return bucket.group, -self._order.first(bucket.names)

    def _in_group(self, group: int) -> Iterator[GradientBucket]:
        return (bucket for bucket in self.buckets if bucket.group == group)

    def _start_complete_groups(
        self, names: Sequence[str], touched: Collection[GradientBucket]
    ) -> None:
        """Remove complete gradients from ``missing`` sets, and start buckets that are complete."""
        num_arrived = self._num_arrived
        # The counts of a weight half are known; those of a backward pass come from earlier steps.
        expected = self._expected if self._num_left is None else self._num_left
        # The first step has no counts yet, so `start_all` starts its buckets.
        complete = [name for name in names if num_arrived[name] == expected.get(name)]
        for bucket in touched:
            bucket.missing.difference_update(complete)
        for group in sorted(
            {bucket.group for bucket in touched if not bucket.missing} & self._armed
        ):
            self._start_group(group)

    def _start_group(self, group: int) -> None:
        """Start the complete buckets of a group, in order, up to the first incomplete one."""
        for bucket in self._in_group(group):
            if bucket.missing:
                return
            self._start(bucket)


@dataclass
class RecordedGradients:
    """Gradients that a recorded backward pass adds.

    Args:
        slots_by_name: All gradient slots, in their states at the start of the recording.
        holds_sums: Whether sums over the ranks may start during the recording, as a part of it.
        groups: Names of the parameters whose gradients arrived together, in the order of arrival. A
            parameter that the model uses twice occurs in two groups.
        sums: Buckets whose sums have started.
        unused: Slots in these buckets that get no gradient and are filled with zeros, by the names
            of their parameters.
        rows: Rows of the gradients, for slots that got gradients of rows only.
    """

    slots_by_name: Mapping[str, GradientSlot] = field(default_factory=dict)
    holds_sums: bool = False
    groups: list[tuple[str, ...]] = field(default_factory=list)
    sums: list[GradientBucket] = field(default_factory=list)
    unused: dict[str, GradientSlot] = field(default_factory=dict)
    rows: dict[GradientSlot, tuple[Int[Tensor, "rows"], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._were_empty = {slot for slot in self.slots_by_name.values() if slot.is_empty}

    def note(self, names: Sequence[str]) -> None:
        """Record gradients that have arrived together."""
        self.groups.append(tuple(names))
        for slot in map(self.slots_by_name.__getitem__, names):
            self.rows.pop(slot, None)
            if slot.rows is not None:
                self.rows[slot] = slot.rows

    @cached_property
    def additions(self) -> tuple[GradientSlot, ...]:
        """Return the gradient slot of each name of the groups, in their order."""
        return tuple(self.slots_by_name[name] for group in self.groups for name in group)

    @cached_property
    def slots(self) -> tuple[GradientSlot, ...]:
        """Return the gradient slots that got gradients, each once."""
        return tuple(dict.fromkeys(self.additions))

    @cached_property
    def overwritten(self) -> tuple[GradientSlot, ...]:
        """Return the gradient slots that were empty before, so that the pass overwrote them."""
        return tuple(slot for slot in self.slots if slot in self._were_empty)

    @cached_property
    def added(self) -> tuple[GradientSlot, ...]:
        """Return the gradient slots that were filled before, so that the pass added to them."""
        return tuple(slot for slot in self.slots if slot not in self._were_empty)


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


def overlapping_pieces(
    ranges_by_rank: Sequence[Sequence[tuple[int, int]]],
) -> list[tuple[int, int]]:
    """List the row ranges [start, stop) that more than one rank has, in order."""
    borders = sorted(
        {border for ranges in ranges_by_rank for row_range in ranges for border in row_range}
    )
    pieces = []
    for start, stop in zip(borders, borders[1:], strict=False):
        starts = [local_start(ranges, start, stop) for ranges in ranges_by_rank]
        if len(starts) - starts.count(None) > 1:
            pieces.append((start, stop))
    return pieces


def local_start(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> int | None:
    """Return the first local row of a piece on a rank that has some ranges; None without it."""
    before = 0
    for low, high in ranges:
        if low <= start and stop <= high:
            return before + start - low
        before += high - low
    return None


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
