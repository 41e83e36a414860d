"""Size of global batches: the same for any number of data ranks, with an optional ramp-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.settings import Count, Elements, coerce_fields


@dataclass(frozen=True)
class RampUp:
    """Growth of the global batch at the start of training.

    The size grows in equal steps, each for an equal share of ``samples``. It depends on the number
    of samples consumed alone, as with ``--rampup-batch-size`` of Megatron-LM.

    Args:
        start: Size of the first global batches (samples).
        increment: Growth of the size in each step (samples).
        samples: Samples after which the size is full (samples).

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
    """

    start: Count
    increment: Count
    samples: Elements

    def __post_init__(self) -> None:
        coerce_fields(self, "ramp_up.")


@dataclass(frozen=True)
class GlobalBatch:
    """Number of samples of each optimizer step over all data ranks.

    Args:
        size: Size of a full global batch (samples).
        ramp_up: Growth of the size at the start of training; None starts with the full size.

    Raises:
        ParallelPlanError: If the ramp-up does not reach the full size in whole steps.
    """

    size: int
    ramp_up: RampUp | None = None

    def __post_init__(self) -> None:
        ramp = self.ramp_up
        if ramp is None:
            return
        growth = self.size - ramp.start
        if growth <= 0 or growth % ramp.increment:
            raise ParallelPlanError(
                "ramp_up must grow from start to global_batch_size in whole increments: start is "
                f"{ramp.start}, increment {ramp.increment}, global_batch_size {self.size}. Use a "
                "start that is smaller by a multiple of the increment, or another increment."
            )

    @classmethod
    def of(
        cls, size: int | None, ramp_up: RampUp | None, batch_size: int | None
    ) -> GlobalBatch | None:
        """Return the requested global batch; None without one.

        Args:
            size: ``global_batch_size`` of the user (samples).
            batch_size: Batch of one data rank, which excludes a global size (samples).

        Raises:
            ParallelPlanError: If arguments contradict each other, and as for the class.
        """
        if size is None:
            if ramp_up is not None:
                raise ParallelPlanError(
                    "ramp_up needs global_batch_size, the size at which it ends: global_batch_size "
                    "is None. Set it, or leave ramp_up out."
                )
            return None
        if batch_size is not None:
            raise ParallelPlanError(
                f"batch_size ({batch_size}) and global_batch_size ({size}) cannot both be given: "
                "the batch size of a rank follows from the global batch. Leave one of them out."
            )
        return cls(size, ramp_up)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return all sizes in the order in which they come (samples)."""
        ramp = self.ramp_up
        if ramp is None:
            return (self.size,)
        return tuple(range(ramp.start, self.size + 1, ramp.increment))

    def check(self, dp: int, microbatch_size: int = 1) -> None:
        """Check that every size can be divided among data ranks and into equal microbatches.

        Raises:
            ParallelPlanError: If one cannot.
        """
        unit = dp * microbatch_size
        for size in self.sizes:
            if size % unit == 0:
                continue
            what = "global_batch_size" if size == self.size else "each size of ramp_up"
            below = size // unit * unit
            legal = [str(n) for n in (below, below + unit) if n]
            raise ParallelPlanError(
                f"{what} must be a multiple of data ranks x microbatch_size: {size} is not one of "
                f"{dp} x {microbatch_size} = {unit}, and every data rank computes the same number "
                f"of microbatches. Use {' or '.join(legal)}."
            )

    def check_accumulation(self, accumulates: bool) -> None:
        """Check that each optimizer step has one batch.

        Raises:
            UnsupportedError: If they do.
        """
        if accumulates:
            raise UnsupportedError(
                "global_batch_size cannot be used with accumulate_grad_batches above 1, because it "
                "is the number of samples of an optimizer step. Use microbatch_size of the "
                "strategy, which accumulates over microbatches, or use batch_size."
            )

    def at(self, position: int) -> int:
        """Return the size of the global batch that begins at a position (samples)."""
        return next(size for size, stop in self._stages() if stop is None or position < stop)

    def count(self, start: int, stop: int) -> int:
        """Return the number of full global batches between two positions (batches)."""
        number = 0
        for size, end in self._stages():
            # Batches that begin before the end of the stage have its size.
            fitting = max(stop - start, 0) // size
            if end is not None:
                fitting = min(fitting, max(-((start - end) // size), 0))
            number += fitting
            start += fitting * size
            if end is not None and start < end:
                break
        return number

    def after(self, start: int, count: int) -> int:
        """Return the position after some global batches (samples)."""
        for size, end in self._stages():
            fitting = count if end is None else min(count, max(-((start - end) // size), 0))
            start += fitting * size
            count -= fitting
        return start

    def _stages(self) -> Iterator[tuple[int, int | None]]:
        """Yield each size, with the position from which the next one applies."""
        ramp = self.ramp_up
        sizes = self.sizes
        for number, size in enumerate(sizes[:-1], 1):
            assert ramp is not None, "only a ramp-up has several sizes"
            # The first whole position at which `number` shares of the samples are consumed.
            yield size, -(-ramp.samples * number // (len(sizes) - 1))
        yield sizes[-1], None
