"""Search for the fastest schedule with given times and memory, among named and greedy ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.greedy_schedule import GreedyConstruction, GreedyRule
from lightning_megatron.plan.live_microbatches import (
    WEIGHT_HALF_SHARE,
    is_within,
    stage_peaks,
)
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.schedule import (
    SCHEDULE_NAMES,
    Schedule,
    build_schedule,
)
from lightning_megatron.plan.settings import require_positive
from lightning_megatron.plan.simulate import Timeline, simulate
from lightning_megatron.plan.stage_costs import StageCosts

AUTOMATIC = "auto"
"""Name of a schedule that the search has constructed."""


@dataclass(frozen=True)
class Candidate:
    """Schedule that the search has considered.

    Args:
        length: Simulated time of a step (ticks).
        peak: Largest size of activations on any stage (the unit of ``kept``).
        fits: Whether the peak is within the limit.
    """

    schedule: Schedule
    length: int
    peak: float
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """Fastest schedule that fits, with the schedules to which it was compared.

    Args:
        timeline: Simulation of the fastest schedule.
        chosen: The fastest schedule with its peak.
        named: All named schedules that can run these sizes.
    """

    timeline: Timeline
    chosen: Candidate
    named: tuple[Candidate, ...]


def search_schedule(
    num_stages: int,
    num_microbatches: int,
    costs: StageCosts,
    kept: Sequence[float],
    limit: float,
    *,
    weight_half_share: float = WEIGHT_HALF_SHARE,
    shapes: Sequence[PlacementShape] = ("loop", "v"),
) -> SearchResult:
    """Find the fastest schedule whose activations fit.

    The search simulates the named schedules and, for each placement, a number of greedy
    constructions under the limit and under smaller limits, which often leave shorter queues at the
    end. A construction is abandoned when it cannot become faster than a schedule that fits. In the
    simulation the result is therefore never slower than the best named schedule that fits. Of
    equally fast schedules the one with the smaller peak is chosen, then a named one.

    Args:
        costs: Times of the virtual stages; their number divided by ``num_stages`` is vpp.
        kept: Activations that a forward keeps for its backward, for each virtual stage (any unit).
        limit: Memory of a stage for activations (the unit of ``kept``).
        shapes: Placements that the model can have.

    Raises:
        ParallelPlanError: For inconsistent numbers, and if nothing fits.
    """
    num_chunks = _num_chunks(num_stages, num_microbatches, costs, kept)

    def evaluate(schedule: Schedule, length: int) -> Candidate:
        peak = max(stage_peaks(schedule, schedule.placement.by_stage(kept), weight_half_share))
        return Candidate(schedule, length, peak, is_within(peak, limit))

    named = tuple(
        evaluate(schedule, simulate(schedule, costs).length)
        for schedule in _named(num_stages, num_microbatches, num_chunks, shapes)
    )
    candidates = list(named)
    for shape in shapes if num_chunks > 1 else shapes[:1]:
        placement = Placement(shape, num_stages, num_chunks)
        # Rows that take longer than a schedule that fits are discarded.
        lengths = [candidate.length for candidate in candidates if candidate.fits]
        longest = min(lengths, default=None)
        rules = _rules(placement, kept, limit, weight_half_share, num_microbatches)
        for rows, length in _constructed(placement, num_microbatches, costs, rules, longest):
            generated = Schedule(
                AUTOMATIC, num_stages, num_microbatches, num_chunks, rows, shape=shape
            )
            candidates.append(evaluate(generated, length))
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        raise _nothing_fits(limit, _smallest_peak(num_stages, num_chunks, kept, shapes))
    # Of equal values `min` takes the first, and named schedules come first.
    chosen = min(fitting, key=lambda candidate: (candidate.length, candidate.peak))
    chosen.schedule.validate()
    return SearchResult(simulate(chosen.schedule, costs), chosen, named)


def _num_chunks(
    num_stages: int, num_microbatches: int, costs: StageCosts, kept: Sequence[float]
) -> int:
    """Check the sizes of a search, and return the chunks per stage."""
    require_positive("pp", num_stages)
    require_positive("num_microbatches", num_microbatches)
    count = costs.num_virtual_stages
    if count % num_stages or len(kept) != count:
        raise ParallelPlanError(
            f"costs and sizes must have one value for each virtual stage: costs name {count}, kept "
            f"names {len(kept)}, pp is {num_stages}. Use lists of pp x vpp values."
        )
    return count // num_stages


def _nothing_fits(limit: float, smallest: float) -> ParallelPlanError:
    return ParallelPlanError(
        f"activations must fit into memory: the limit is {limit:g}, one microbatch in all chunks "
        f"of the fullest stage keeps {smallest:g}. Raise the limit to at least that, or use "
        "smaller microbatches."
    )


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


def _named(
    num_stages: int, num_microbatches: int, num_chunks: int, shapes: Sequence[PlacementShape]
) -> Iterator[Schedule]:
    for name in SCHEDULE_NAMES:
        try:
            schedule = build_schedule(name, num_stages, num_microbatches, num_chunks)
        except ParallelPlanError:
            continue
        if schedule.shape in shapes or num_chunks == 1:
            yield schedule


def _constructed(
    placement: Placement,
    num_microbatches: int,
    costs: StageCosts,
    rules: Iterable[GreedyRule],
    longest: int | None,
) -> Iterator[tuple[tuple[tuple[Action, ...], ...], int]]:
    """Construct the rows of rules and their length, except rows that cannot be the best ones.

    Args:
        placement: Stage and chunk of every virtual stage.
        costs: Times of the virtual stages.
        rules: Rules whose limits are legal ones, the lowest limit first.
        longest: Time of the fastest schedule that is known; None without one (ticks).
    """
    # Choices whose rows the limit has not changed. Higher limits would give the same rows.
    unlimited = set()
    for rule in rules:
        choices = (rule.alternate, rule.deep_first, rule.patience)
        if choices in unlimited:
            continue
        greedy = GreedyConstruction(placement, num_microbatches, costs, rule, longest)
        rows = greedy.rows()
        if not greedy.is_limited:
            unlimited.add(choices)
        if rows is not None:
            longest = greedy.length
            yield rows, longest


def _rules(
    placement: Placement,
    kept: Sequence[float],
    limit: float,
    weight_half_share: float,
    num_microbatches: int,
) -> Iterator[GreedyRule]:
    stage_sizes = [0.0] * placement.num_stages
    for virtual, size in enumerate(kept):
        stage_sizes[placement.owner(virtual)[0]] += size
    # Microbatches that a stage may keep: as many as zb-h1, as zb-h2, or a number between them.
    fullest = max(stage_sizes)
    numbers = (placement.num_stages, (3 * placement.num_stages) // 2, 2 * placement.num_stages - 1)
    limits = {min(limit, fullest * min(number, num_microbatches)) for number in numbers} | {limit}
    choices = product(sorted(limits), (True, False), (True, False), (0.0, 0.5, 1.0))
    for largest, alternate, deep_first, patience in choices:
        if placement.num_chunks > 1 or deep_first:
            yield GreedyRule(largest, kept, weight_half_share, alternate, deep_first, patience)


def _smallest_peak(
    num_stages: int, num_chunks: int, kept: Sequence[float], shapes: Sequence[PlacementShape]
) -> float:
    placements = (Placement(shape, num_stages, num_chunks) for shape in shapes)
    return min(max(map(sum, placement.by_stage(kept))) for placement in placements)
