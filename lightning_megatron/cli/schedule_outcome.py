"""Simulation of schedules, with times and memory: a named one, the user's own, or all of them."""

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
    """Sizes for which a schedule is built.

    Args:
        num_stages: Pipeline-parallel size.
        num_microbatches: Microbatches per step.
        num_chunks: Chunks per stage (vpp); None means the number that the schedule needs.
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
    """Simulation of a schedule, with the activations that its stages keep.

    Args:
        label: Name of the schedule in tables and pictures.
        timeline: Simulated schedule.
        live: Maximum number of microbatches that each stage keeps, counted once for each chunk.
        peaks: Maximum size of the activations that each stage keeps (unit of the costs).
        alternatives: For "auto", the named schedules with which the search compared its result.
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
        """Return whether the activations of every stage are within a limit (unit of the costs)."""
        return is_within(max(self.peaks), limit)


@dataclass(frozen=True)
class Comparison:
    """Outcomes of all schedules for the same sizes and costs.

    Args:
        outcomes: Simulations of the schedules that can run.
        refusals: Reasons why the other schedules cannot run, by name.
    """

    outcomes: tuple[ScheduleOutcome, ...]
    refusals: dict[str, str]


def simulated(
    schedule: Schedule, costs: PipelineCosts, label: str | None = None
) -> ScheduleOutcome:
    """Simulate a schedule.

    Args:
        schedule: Order of actions.
        costs: Times and sizes of the virtual stages of the schedule, or of finer virtual stages
            that can be merged to them.
        label: Name in tables and pictures; None means the name of the schedule.

    Raises:
        ParallelPlanError: If the costs cannot be merged to the virtual stages of the schedule.
    """
    merged_costs = costs.of(schedule.placement.num_virtual_stages)
    return ScheduleOutcome(
        label or schedule.name,
        simulate(schedule, merged_costs.times),
        tuple(live_microbatches(schedule, rank).total for rank in range(schedule.num_stages)),
        stage_peaks(schedule, merged_costs.kept_by_stage(schedule), merged_costs.weight_half_share),
    )


def named_outcome(
    name: str, sizes: PipelineSizes, costs: PipelineCosts, limit: float | None
) -> ScheduleOutcome:
    """Build and simulate a named schedule, or search for the fastest one ("auto").

    Args:
        name: One of ``NAMES``.
        sizes: Sizes of the pipeline.
        costs: Times and sizes of the virtual stages of the schedule, or of finer virtual stages
            that can be merged to them.
        limit: Limit on the activations of a stage, for "auto"; None means the peak of 1f1b (unit
            of the costs).

    Raises:
        ParallelPlanError: If the schedule cannot run with these sizes, or the costs do not fit
            them.
    """
    if name == AUTOMATIC:
        return _searched(sizes, costs, limit)
    chunks = sizes.chunks_of(name)
    schedule = build_schedule(
        name, sizes.num_stages, sizes.num_microbatches, chunks, sizes.group_size
    )
    return simulated(schedule, costs)


def parts_of(sizes: PipelineSizes, schedules: Sequence[Schedule] = ()) -> int:
    """Return the smallest number of parts of a stage such that each chunk has whole parts.

    Args:
        sizes: Sizes of the pipeline.
        schedules: The user's own schedules.
    """
    chunks = [_own_sizes(name, sizes).chunks_of(name) for name in NAMES]
    return lcm(*chunks, *(schedule.num_chunks for schedule in schedules))


def compare(
    sizes: PipelineSizes,
    costs: PipelineCosts,
    limit: float | None,
    schedules: Sequence[Schedule] = (),
) -> Comparison:
    """Simulate all schedules with the same work per stage.

    Args:
        sizes: Sizes of the pipeline. The chunks apply to "interleaved" and "auto", and the group
            size to "interleaved".
        costs: Times and sizes of equal parts of the stages; see :func:`parts_of`.
        limit: Limit on the activations of a stage, for "auto"; None means the peak of 1f1b (unit
            of the costs).
        schedules: The user's own schedules, with the same pp and number of microbatches.
    """
    outcomes = [simulated(schedule, costs) for schedule in schedules]
    refusals = {}
    for name in NAMES:
        try:
            outcomes.append(named_outcome(name, _own_sizes(name, sizes), costs, limit))
        except ParallelPlanError as error:
            refusals[name] = str(error)
    return Comparison(tuple(outcomes), refusals)


def _own_sizes(name: str, sizes: PipelineSizes) -> PipelineSizes:
    """Return the sizes for a named schedule, without given sizes that do not apply to it."""
    num_chunks = sizes.num_chunks if name in ("interleaved", AUTOMATIC) else None
    group_size = sizes.group_size if name == "interleaved" else None
    return PipelineSizes(sizes.num_stages, sizes.num_microbatches, num_chunks, group_size)


def _searched(sizes: PipelineSizes, costs: PipelineCosts, limit: float | None) -> ScheduleOutcome:
    if limit is None:
        reference = build_schedule("1f1b", sizes.num_stages, sizes.num_microbatches)
        limit = max(simulated(reference, costs).peaks)
    merged_costs = costs.of(sizes.num_stages * sizes.chunks_of(AUTOMATIC))
    result = search_schedule(
        sizes.num_stages,
        sizes.num_microbatches,
        merged_costs.times,
        merged_costs.kept,
        limit,
        weight_half_share=merged_costs.weight_half_share,
    )
    schedule = result.chosen.schedule
    label = AUTOMATIC if schedule.name == AUTOMATIC else f"{AUTOMATIC} ({schedule.name})"
    outcome = simulated(schedule, merged_costs, label)
    return ScheduleOutcome(
        label, outcome.timeline, outcome.live, outcome.peaks, alternatives=result.named
    )
