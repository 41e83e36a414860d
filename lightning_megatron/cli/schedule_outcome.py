"""Schedules with their simulated times and memory: one by name, one of a user, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from lightning_megatron.cli.schedule_costs import PipelineCosts
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.automatic_schedule import AUTOMATIC, Candidate, search_schedule
from lightning_megatron.plan.live_microbatches import (
    is_within,
    live_microbatches,
    stage_peaks,
)
from lightning_megatron.plan.schedule import (
    SCHEDULE_NAMES,
    Schedule,
    build_schedule,
    shape_of,
)
from lightning_megatron.plan.simulate import Timeline, simulate

NAMES = (*SCHEDULE_NAMES, AUTOMATIC)


@dataclass(frozen=True)
class PipelineSizes:
    """Sizes that a schedule is built for.

    Args:
        num_stages: Pipeline-parallel size.
        num_microbatches: Microbatches per step.
        num_chunks: Chunks per stage (vpp); None means those that the schedule needs.
        group_size: Group size of "interleaved", see ``build_schedule``.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int | None = None
    group_size: int | None = None

    def chunks_of(self, name: str) -> int:
        """Return the chunks per stage of a named schedule."""
        if self.num_chunks is not None:
            return self.num_chunks
        return 2 if shape_of(name) == "v" or name in ("interleaved", AUTOMATIC) else 1


@dataclass(frozen=True)
class ScheduleOutcome:
    """Simulation of a schedule, with what its stages keep.

    Args:
        label: Name of the schedule in tables and pictures.
        timeline: Simulated schedule.
        live: Largest number of microbatches that each stage keeps, counted for each chunk.
        peaks: Largest size of the activations that each stage keeps.
        alternatives: For "auto", the named schedules that it was compared with.
    """

    label: str
    timeline: Timeline
    live: tuple[int, ...]
    peaks: tuple[float, ...]
    alternatives: tuple[Candidate, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """Return the schedule."""
        return self.timeline.schedule

    @property
    def chunks(self) -> str:
        """Return the number of chunks in words, with their placement, such as "2 chunks in a V"."""
        number = self.schedule.num_chunks
        if number == 1:
            return "1 chunk"
        return f"{number} chunks in a {'V' if self.schedule.shape == 'v' else 'loop'}"

    def fits(self, limit: float) -> bool:
        """Return whether the activations of all stages are within a limit."""
        return is_within(max(self.peaks), limit)


@dataclass(frozen=True)
class Comparison:
    """All schedules at the same sizes and costs.

    Args:
        outcomes: Schedules that can run.
        refusals: Why the others cannot, by name.
    """

    outcomes: tuple[ScheduleOutcome, ...]
    refusals: dict[str, str]


def simulated(
    schedule: Schedule, costs: PipelineCosts, label: str | None = None
) -> ScheduleOutcome:
    """Simulate a schedule.

    Args:
        schedule: Order of actions.
        costs: Times and sizes of its virtual stages, or of equal parts of each.
        label: Name in tables and pictures; None means that of the schedule.

    Raises:
        ParallelPlanError: If the costs are for other virtual stages.
    """
    own = costs.of(schedule.placement.num_virtual_stages)
    return ScheduleOutcome(
        label or schedule.name,
        simulate(schedule, own.times),
        tuple(live_microbatches(schedule, rank).total for rank in range(schedule.num_stages)),
        stage_peaks(schedule, own.kept_by(schedule), own.weight_half_share),
    )


def named_outcome(
    name: str, sizes: PipelineSizes, costs: PipelineCosts, limit: float | None
) -> ScheduleOutcome:
    """Build and simulate a named schedule, or search one.

    Args:
        name: One of ``NAMES``.
        sizes: Sizes of the pipeline.
        costs: Times and sizes of its virtual stages, or of equal parts of each.
        limit: Memory of a stage for activations, for "auto"; None means what 1f1b needs.

    Raises:
        ParallelPlanError: For sizes that the schedule cannot run, and costs of other sizes.
    """
    if name == AUTOMATIC:
        return _searched(sizes, costs, limit)
    chunks = sizes.chunks_of(name)
    schedule = build_schedule(
        name, sizes.num_stages, sizes.num_microbatches, chunks, sizes.group_size
    )
    return simulated(schedule, costs)


def parts_of(sizes: PipelineSizes, own: Sequence[Schedule] = ()) -> int:
    """Return into how many parts a stage must be cut so that every schedule's chunks are some."""
    chunks = [_own_sizes(name, sizes).chunks_of(name) for name in NAMES]
    return lcm(*chunks, *(schedule.num_chunks for schedule in own))


def compare(
    sizes: PipelineSizes,
    costs: PipelineCosts,
    limit: float | None,
    own: Sequence[Schedule] = (),
) -> Comparison:
    """Simulate all schedules with the same work of each stage.

    Args:
        sizes: Sizes of the pipeline; the chunks are those of "interleaved" and "auto", and the
            group size that of "interleaved".
        costs: Times and sizes of parts of the stages, see :func:`parts_of`.
        limit: Memory of a stage for activations, for "auto"; None means what 1f1b needs.
        own: Further schedules of the same pp and microbatches.
    """
    outcomes = [simulated(schedule, costs) for schedule in own]
    refusals = {}
    for name in NAMES:
        try:
            outcomes.append(named_outcome(name, _own_sizes(name, sizes), costs, limit))
        except ParallelPlanError as error:
            refusals[name] = str(error)
    return Comparison(tuple(outcomes), refusals)


def _own_sizes(name: str, sizes: PipelineSizes) -> PipelineSizes:
    """Return the sizes with which a schedule takes part in a comparison."""
    num_chunks = sizes.num_chunks if name in ("interleaved", AUTOMATIC) else None
    group_size = sizes.group_size if name == "interleaved" else None
    return PipelineSizes(sizes.num_stages, sizes.num_microbatches, num_chunks, group_size)


def _searched(sizes: PipelineSizes, costs: PipelineCosts, limit: float | None) -> ScheduleOutcome:
    if limit is None:
        one = build_schedule("1f1b", sizes.num_stages, sizes.num_microbatches)
        limit = max(simulated(one, costs).peaks)
    own = costs.of(sizes.num_stages * sizes.chunks_of(AUTOMATIC))
    found = search_schedule(
        sizes.num_stages,
        sizes.num_microbatches,
        own.times,
        own.kept,
        limit,
        weight_half_share=own.weight_half_share,
    )
    schedule = found.chosen.schedule
    label = AUTOMATIC if schedule.name == AUTOMATIC else f"{AUTOMATIC} ({schedule.name})"
    outcome = simulated(schedule, own, label)
    return ScheduleOutcome(
        label, outcome.timeline, outcome.live, outcome.peaks, alternatives=found.named
    )
