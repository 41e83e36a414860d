"""How many samples a microbatch has: as the user says, the whole batch, or chosen for the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.schedule import check_schedule_sizes

#: Microbatches and chunks for each stage after the first: stages are then idle for at most a fifth of a step.
_PER_STAGE = 4


@dataclass(frozen=True)
class MicrobatchRule:
    """Decide into how many microbatches a batch is cut, from integers that all ranks of a pipeline share.

    Args:
        size: Samples of a microbatch; ``batch`` for one microbatch; None for one with a single stage, and else for the
            fewest microbatches of equal size that keep the stages idle for at most a fifth of a step.
        schedule: ``1f1b``, ``interleaved`` or ``gpipe``.
        num_stages: Pipeline-parallel size.
        num_chunks: Chunks of layers on a stage.
        group_size: Microbatches that pass a chunk before the next chunk's turn; None means ``num_stages``.
    """

    size: int | Literal["batch"] | None
    schedule: str
    num_stages: int
    num_chunks: int
    group_size: int | None

    @property
    def is_whole(self) -> bool:
        """Return whether every batch is one microbatch, whatever it holds."""
        return self.size == "batch" or (self.size is None and self.num_stages == 1)

    @property
    def is_chosen(self) -> bool:
        """Return whether the size is found for the pipeline, and neither given nor the whole batch."""
        return self.size is None and self.num_stages > 1

    def size_for(self, num_samples: int) -> int:
        """Return the samples of a microbatch.

        Args:
            num_samples: Samples of a batch of one data-parallel rank (samples).
        """
        if self.is_whole or num_samples < 1:
            return max(num_samples, 1)
        if isinstance(self.size, int):
            return self.size
        return _chosen_size(self, num_samples)

    def count_for(self, num_samples: int) -> int:
        """Return the microbatches of a batch; the last one may be smaller.

        Args:
            num_samples: Samples of a batch of one data-parallel rank (samples).
        """
        return -(-num_samples // self.size_for(num_samples))

    def check(self, num_samples: int) -> None:
        """Refuse a batch of so many samples if the schedule cannot run its microbatches.

        Raises:
            ParallelPlanError: If there are too few of them, or another number of them.
        """
        count = self.count_for(num_samples)
        check_schedule_sizes(self.schedule, self.num_stages, count, self.num_chunks, self.group_size)

    def idle_share(self, num_microbatches: int) -> float:
        """Return the share of a step that a stage waits for its first and after its last microbatch.

        Source: Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2.
        """
        waits = self.num_stages - 1
        return waits / (num_microbatches * self.num_chunks + waits)

    def can_run(self, num_microbatches: int) -> bool:
        """Return whether the schedule takes so many microbatches."""
        try:
            check_schedule_sizes(self.schedule, self.num_stages, num_microbatches, self.num_chunks, self.group_size)
        except ParallelPlanError:
            return False
        return True


@cache
def _chosen_size(rule: MicrobatchRule, num_samples: int) -> int:
    divisors = [count for count in range(1, num_samples + 1) if not num_samples % count]
    counts = [count for count in divisors if rule.can_run(count)]
    enough = [count for count in counts if count * rule.num_chunks >= _PER_STAGE * (rule.num_stages - 1)]
    # Without a legal count the schedule is checked with the most microbatches, and says which numbers it takes.
    return num_samples // (min(enough) if enough else max(counts, default=num_samples))
