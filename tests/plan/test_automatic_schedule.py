"""The chosen schedule is the fastest named one that fits in memory."""

from __future__ import annotations

import random

from hypothesis import given

from lightning_megatron.plan import Placement, build_schedule, simulate
from lightning_megatron.plan.automatic_schedule import fastest, in_halves, simulate_named
from lightning_megatron.plan.live_microbatches import WEIGHT_HALF_SHARE, check_peak
from tests.plan.pipelines import CHUNKS, NUMBERS, check_runs, drawn_costs, order_of


@given(NUMBERS)
def test_the_fastest_named_schedule_that_fits_is_chosen(number):
    draw = random.Random(number)
    chunks = draw.randint(1, 2)
    stages, microbatches = draw.randint(1, 5), draw.randint(1, 12)
    placement = Placement("v" if chunks == 2 else "loop", stages, chunks)
    costs = drawn_costs(number, placement)
    kept = [draw.choice([0.5, 1.0, 1.5]) for _ in range(stages * chunks)]
    # As much as the base of the search needs, which always fits, or more.
    limit = 1.5 * chunks * stages * draw.uniform(1, 2)
    candidates = simulate_named(placement, microbatches, costs, kept, limit, WEIGHT_HALF_SHARE)
    names = [candidate.timeline.schedule.name for candidate in candidates]
    too_large = {"dualpipe-v"} if microbatches < 2 * stages else set()
    assert names == [name for name in CHUNKS if CHUNKS[name] == chunks and name not in too_large]
    chosen = fastest(candidates)
    schedule = chosen.timeline.schedule.validate()
    check_peak(schedule, limit, placement.by_stage(kept))
    check_runs(schedule)
    fitting = [candidate for candidate in candidates if candidate.fits]
    found = [(candidate.timeline.length, candidate.peak) for candidate in fitting]
    assert (chosen.timeline.length, chosen.peak) == min(found)
    assert simulate(schedule, costs).length == chosen.timeline.length


def test_a_schedule_that_keeps_too_much_is_not_chosen():
    placement = Placement("v", 4, 2)
    costs = drawn_costs(1, placement)
    for limit, names in ((4.0, ["zb-v"]), (4.5, ["zb-v", "dualpipe-v"])):
        candidates = simulate_named(placement, 16, costs, [0.5] * 8, limit, 1.0)
        fitting = [one.timeline.schedule.name for one in candidates if one.fits]
        assert fitting == names


def test_split_backwards_keep_the_order_and_are_no_longer_than_full_backwards():
    for name, chunks in (("1f1b", 1), ("dualpipe-v", 2)):
        schedule = build_schedule(name, 4, 8, chunks)
        halves = in_halves(schedule).validate()
        assert {action.kind for row in halves.rows for action in row} == {"F", "I", "W"}
        # An input gradient is sent before the weight half runs, so no stage waits longer.
        assert simulate(halves).length <= simulate(schedule).length
        for rank in range(4):
            assert order_of(halves, rank) == order_of(schedule, rank)
