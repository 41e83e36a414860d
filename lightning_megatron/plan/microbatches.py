"""Size of a microbatch: given by the user, the whole batch, or chosen for the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.custom_schedule import CustomOrder, OrderOfPasses, build_order
from lightning_megatron.plan.schedule import (
    NAMED_SCHEDULES,
    check_pairs,
    check_schedule_sizes,
)
from lightning_megatron.plan.simulate import simulate

#: Largest share of a step in which stages are idle, where the size of a microbatch is chosen.
_MAX_IDLE_SHARE = 1 / 5


@dataclass(frozen=True)
class MicrobatchRule:
    """Rule that splits a batch into microbatches, from integers that all ranks of a pipeline share.

    Args:
        size: Samples of a microbatch. ``batch`` means one microbatch. None means one microbatch
            with a single stage, otherwise the fewest microbatches of equal size with which stages
            are idle for at most a fifth of a step.
        group_size: Microbatches that pass through a chunk before the next chunk starts; None means
            ``num_stages``.
        is_paired: Whether stages switch between passes of two microbatches.
    """

    size: int | Literal["batch"] | None
    schedule: OrderOfPasses
    num_stages: int
    num_chunks: int
    group_size: int | None
    is_paired: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether every batch is one microbatch, regardless of its size."""
        return self.size == "batch" or (self.size is None and self.num_stages == 1)

    @property
    def is_chosen(self) -> bool:
        """Return whether the size is chosen for the pipeline."""
        return self.size is None and self.num_stages > 1

    def size_for(self, num_samples: int) -> int:
        """Return the number of samples in a microbatch."""
        if self.is_whole or num_samples < 1:
            return max(num_samples, 1)
        if isinstance(self.size, int):
            return self.size
        return _chosen_size(self, num_samples)

    def count_for(self, num_samples: int) -> int:
        """Return the number of microbatches in a batch; the last one may be smaller."""
        return -(-num_samples // self.size_for(num_samples))

    def check(self, num_samples: int) -> None:
        """Check that the schedule can run the microbatches of a batch with this number of samples.

        Raises:
            ParallelPlanError: If the schedule cannot run this number of microbatches.
        """
        self.check_count(self.count_for(num_samples))

    def check_count(self, num_microbatches: int) -> None:
        """Check that the schedule can run this number of microbatches.

        Raises:
            ParallelPlanError: If it cannot.
        """
        if self.is_paired:
            check_pairs(self.schedule, self.num_stages, num_microbatches)
        if isinstance(self.schedule, CustomOrder):
            self.schedule.build(num_microbatches)
            return
        check_schedule_sizes(
            self.schedule, self.num_stages, num_microbatches, self.num_chunks, self.group_size
        )

    def idle_share(self, num_microbatches: int) -> float:
        """Return the share of a step in which a stage waits for other stages.

        A forward and each half of a backward pass count as equally long.

        Source: Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2, for named
            schedules with whole backward passes; others are simulated.
        """
        if not isinstance(self.schedule, CustomOrder) and not NAMED_SCHEDULES[self.schedule].splits:
            waits = self.num_stages - 1
            return waits / (num_microbatches * self.num_chunks + waits)
        return simulate(
            build_order(self.schedule, self.num_stages, num_microbatches, self.num_chunks)
        ).bubble

    def can_run(self, num_microbatches: int) -> bool:
        """Return whether the schedule can run this number of microbatches."""
        try:
            self.check_count(num_microbatches)
        except ParallelPlanError:
            return False
        return True


@cache
def _chosen_size(rule: MicrobatchRule, num_samples: int) -> int:
    divisors = [count for count in range(1, num_samples + 1) if not num_samples % count]
    counts = [count for count in divisors if rule.can_run(count)]
    enough = next((count for count in counts if rule.idle_share(count) <= _MAX_IDLE_SHARE), None)
    if enough is not None:
        return num_samples // enough
    # Without a legal count, `check` fails for one sample per microbatch and names the legal
    # numbers.
    return num_samples // max(counts, default=num_samples)
