"""Graph slots: sets of CUDA graphs of a chunk, each occupied by one microbatch at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.actions import PipelineUnit
from lightning_megatron.plan.live_microbatches import LIVE_CHANGE, live_microbatches
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, Schedule


@dataclass(frozen=True)
class GraphSlots:
    """Slot of every unit of a stage, a unit being one microbatch in one chunk.

    A CUDA graph writes to the same addresses at each replay, so a chunk needs one set of graphs,
    called a slot, for each microbatch that is between its forward and the end of its backward. At
    its forward a unit occupies the slot of its chunk that has been free longest, so that sends from
    the slot's memory have most time to end. The slot is free again after the backward, or after the
    weight half of a split backward. If a chunk takes its microbatches in order, as under every
    named schedule, the n-th one occupies slot n modulo the number of slots. Without backwards
    nothing is kept, and every unit runs in slot 0.

    Raises:
        UnsupportedError: As for :func:`check_graph_slots`.
    """

    schedule: Schedule
    rank: int

    def __post_init__(self) -> None:
        check_graph_slots(self.schedule)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Return the number of slots of every chunk."""
        return _peaks(self.schedule, self.rank)

    def slot_of(self, unit: PipelineUnit) -> int:
        """Return the index of the slot that a unit occupies."""
        return self._slot_of_unit[unit]

    @property
    def can_share(self) -> bool:
        """Return whether microbatches can share a slot for layers that keep only their inputs.

        These inputs are few enough to be copied out of the slot and back. A weight half reads much
        more, which the input half leaves in the slot. A single stage whose backward passes directly
        follow their forward passes has one slot in any case.
        """
        actions = self.schedule.actions(self.rank)
        is_needed = self.schedule.num_stages > 1 or max(self.peaks) > 1
        return is_needed and all(action.kind != "W" for action in actions)

    @cached_property
    def first_units(self) -> tuple[PipelineUnit | None, ...]:
        """Return, for each chunk, the unit whose backward runs first in the step.

        That backward overwrites the gradient sums of the previous step; all later ones add to them.
        Its slot is slot 0 under every named schedule. None for a chunk without backwards.
        """
        first: dict[int, PipelineUnit] = {}
        for action in self.schedule.actions(self.rank):
            if action.kind in ("B", "I"):
                first.setdefault(action.chunk, action.unit)
        return tuple(first.get(chunk) for chunk in range(self.schedule.num_chunks))

    @cached_property
    def _slot_of_unit(self) -> dict[PipelineUnit, int]:
        row = self.schedule.actions(self.rank)
        if self.schedule.forward_only:
            return {action.unit: 0 for action in row}
        free = [deque(range(peak)) for peak in self.peaks]
        slot_of_unit: dict[PipelineUnit, int] = {}
        for action in row:
            slots = free[action.chunk]
            change = LIVE_CHANGE[action.kind]
            if change > 0:
                slot_of_unit[action.unit] = slots.popleft()
            elif change < 0:
                slots.append(slot_of_unit[action.unit])
        return slot_of_unit


def check_graph_slots(schedule: Schedule) -> None:
    """Check that the number of slots does not grow with the number of microbatches.

    Raises:
        UnsupportedError: For gpipe, and for a schedule with more than two microbatches per stage of
            which a chunk keeps all at once.
    """
    if schedule.forward_only:
        return
    num_microbatches = schedule.num_microbatches
    peaks = [max(_peaks(schedule, rank)) for rank in range(schedule.num_stages)]
    stage = max(range(len(peaks)), key=peaks.__getitem__)
    fills = 2 * schedule.num_stages
    named = NAMED_SCHEDULES.get(schedule.name)
    keeps_all = named is not None and named.keeps_all
    if not keeps_all and not peaks[stage] == num_microbatches > fills:
        return
    raise UnsupportedError(
        "CUDA graphs need a schedule whose stages keep a limited number of microbatches: schedule "
        f"{schedule.name!r} keeps all {num_microbatches} of the step at once on stage {stage}, and "
        "each of them needs its own graphs and memory. Use schedule '1f1b', or 'interleaved' with "
        "groups of pp microbatches."
    )


def _peaks(schedule: Schedule, rank: int) -> tuple[int, ...]:
    if schedule.forward_only:
        return (1,) * schedule.num_chunks
    return live_microbatches(schedule, rank).slots
