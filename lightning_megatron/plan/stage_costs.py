"""Times of the virtual stages of a pipeline, and of transfers between them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Kind
from lightning_megatron.plan.settings import require_positive


@dataclass(frozen=True)
class StageCosts:
    """Times of every virtual stage, in ticks of any length.

    Args:
        weight_half: Time of the weight half, for each virtual stage. A whole backward takes the sum
            of both halves.
        transfer: Time of a transfer between two stages.

    Raises:
        ParallelPlanError: For times below 1 and lists of different lengths.
    """

    forward: tuple[int, ...]
    input_half: tuple[int, ...]
    weight_half: tuple[int, ...]
    transfer: int = 0

    def __post_init__(self) -> None:
        lists = {
            "forward": self.forward,
            "input_half": self.input_half,
            "weight_half": self.weight_half,
        }
        lengths = {name: len(times) for name, times in lists.items()}
        if len(set(lengths.values())) > 1 or not self.forward:
            raise ParallelPlanError(
                "costs must have one time for each virtual stage in every list: the lengths of the "
                f"lists are {lengths}. Use lists with pp x vpp times each."
            )
        for name, times in lists.items():
            for time in times:
                require_positive(f"each time of {name}", time)
        if self.transfer < 0:
            raise ParallelPlanError(
                f"transfer must not be negative: it is {self.transfer} ticks. Use 0 or more."
            )

    @property
    def num_virtual_stages(self) -> int:
        """Return the number of virtual stages that have times."""
        return len(self.forward)

    def merged(self, num_virtual_stages: int) -> StageCosts:
        """Return the times of fewer virtual stages, each of which has several consecutive ones.

        Raises:
            ParallelPlanError: If the virtual stages cannot be merged evenly.
        """
        group_size = merge_size(self.num_virtual_stages, num_virtual_stages)

        def sums(times: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(
                sum(times[first : first + group_size]) for first in range(0, len(times), group_size)
            )

        return StageCosts(
            sums(self.forward), sums(self.input_half), sums(self.weight_half), self.transfer
        )

    def ticks(self, kind: Kind, virtual_stage: int) -> int:
        """Return the time of an action in a virtual stage."""
        if kind == "F":
            return self.forward[virtual_stage]
        if kind == "I":
            return self.input_half[virtual_stage]
        if kind == "W":
            return self.weight_half[virtual_stage]
        return self.input_half[virtual_stage] + self.weight_half[virtual_stage]


def merge_size(num_given: int, needed: int) -> int:
    """Return how many given virtual stages make up each of a smaller number of them.

    Raises:
        ParallelPlanError: If the virtual stages cannot be merged evenly.
    """
    if num_given % needed:
        raise ParallelPlanError(
            "costs must have one time for each virtual stage, or for equal parts of each: they "
            f"have {num_given}, and the schedule has {needed} virtual stages. Use {needed} times "
            f"in each list, or a multiple of {needed}."
        )
    return num_given // needed
