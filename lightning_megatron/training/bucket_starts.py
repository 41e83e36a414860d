"""Start of the reduction of each gradient bucket during a step's last backward passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lightning_megatron.training.gradient_bucket import GradientBucket
from lightning_megatron.training.use_order import UseOrder


class BucketStarts:
    """Tracker that starts the reduction of each bucket when its last gradient has arrived.

    The reductions must start in the same order on all ranks, so a complete bucket waits for the
    buckets before it in its group.

    Args:
        start: Function that starts the reduction of a bucket, unless it has started already.
        order: Order in which the forward pass reads the parameters.
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
        """Expect the last weight half of a chunk, and start the buckets that are complete already.

        A weight half is the part of a split backward pass that computes weight gradients.

        Args:
            chunk: Chunk whose other gradients are complete.
            left: Number of gradients that the weight half will add to each parameter.
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
        """Count gradients that have arrived together, and start the buckets that are complete now.

        Raises:
            RuntimeError: If the bucket of one of these parameters has started already.
        """
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
                "often than in earlier steps. Use MegatronStrategy(overlap_gradients=False)."
            )
        for name in names:
            num_arrived[name] = num_arrived.get(name, 0) + 1
        # Only the last backward pass of a step completes gradients; `_armed` lists its chunks.
        if self._armed:
            self._start_complete_groups(names, touched)

    def _sort_key(self, bucket: GradientBucket) -> tuple[int, int]:
        """Return the sort key of a bucket: parameters used first get their gradients last."""
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
