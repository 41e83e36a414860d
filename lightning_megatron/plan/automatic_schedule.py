"""Simulation of the named schedules with given times and memory, and the fastest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.live_microbatches import is_within, stage_peaks
from lightning_megatron.plan.placement import Placement
from lightning_megatron.plan.schedule import SCHEDULE_NAMES, Schedule, build_schedule
from lightning_megatron.plan.simulate import StageCosts, Timeline, simulate


@dataclass(frozen=True)
class Candidate:
    """Simulation of a named schedule.

    Args:
        peak: Largest size of activations on any stage (the unit of ``kept``).
        fits: Whether the peak is within the limit.
    """

    timeline: Timeline
    peak: float
    fits: bool


def simulate_named(
    placement: Placement,
    num_microbatches: int,
    costs: StageCosts,
    kept: Sequence[float],
    limit: float,
    weight_half_share: float,
) -> tuple[Candidate, ...]:
    """Simulate all named schedules that can run on a placement.

    Args:
        kept: Activations that a forward keeps for its backward, for each virtual stage (any unit).
        limit: Memory of a stage for activations (the unit of ``kept``).
    """
    candidates = []
    for name in SCHEDULE_NAMES:
        try:
            schedule = build_schedule(
                name, placement.num_stages, num_microbatches, placement.num_chunks
            )
        except ParallelPlanError:
            continue
        if schedule.placement == placement:
            peak = max(stage_peaks(schedule, placement.by_stage(kept), weight_half_share))
            timeline = simulate(schedule, costs)
            candidates.append(Candidate(timeline, peak, is_within(peak, limit)))
    return tuple(candidates)


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate that fits; of equally fast ones that with the smallest peak."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    return min(fitting, key=lambda candidate: (candidate.timeline.length, candidate.peak))


def in_halves(schedule: Schedule) -> Schedule:
    """Return a schedule with every backward as an input half and, at once, its weight half.

    It keeps the same activations as the schedule, and shows the time of each half.
    """
    halves: dict[Kind, tuple[Kind, ...]] = {"B": ("I", "W")}
    rows = []
    for row in schedule.rows:
        actions = [
            Action(kind, action.chunk, action.microbatch)
            for action in row
            for kind in halves.get(action.kind, (action.kind,))
        ]
        rows.append(tuple(actions))
    return replace(schedule, rows=tuple(rows))
