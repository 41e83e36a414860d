"""Buckets of gradients: their reductions over the data-parallel ranks, and when each one starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot
from lightning_megatron.optimizer.flat_buffer import FlatBuffer, UseOrder
from lightning_megatron.shapes import Int, Shaped


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

    def begin_last_backward(self, chunk: int) -> None:
        """Expect the last backward pass of a chunk before the optimizer step."""
        self._armed.add(chunk)
        self._num_left = None
        for bucket in self._in_group(chunk):
            bucket.missing = set(bucket.names)
            self._num_arrived.update(dict.fromkeys(bucket.names, 0))

    def begin_last_weight_half(self, chunk: int, left: Mapping[str, int]) -> None:
        """Expect the last weight half of a chunk, and start buckets that are complete already.

        A weight half is the part of a split backward pass that computes weight gradients; ``left``
        counts those that it will add to each parameter.
        """
        self._armed.add(chunk)
        self._num_left = left
        for bucket in self._in_group(chunk):
            bucket.missing = left.keys() & set(bucket.names)
            self._num_arrived |= dict.fromkeys(bucket.names, 0)
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
