"""A searched schedule is legal, fits in memory, and no named schedule that fits is faster."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given

from lightning_megatron.plan import (
    Placement,
    Schedule,
    StageCosts,
    build_schedule,
    live_microbatches,
    plan_transfers,
    simulate,
)
from lightning_megatron.plan.automatic_schedule import _rules, in_halves, search_schedule
from lightning_megatron.plan.greedy_schedule import GreedyConstruction, GreedyRule
from lightning_megatron.plan.live_microbatches import WEIGHT_HALF_SHARE, check_peak, stage_peaks
from tests.plan.pipelines import NUMBERS, check_runs, drawn_costs
from tests.refusals import check_refusals

RULE = GreedyRule(
    limit=4.0, kept=(), weight_half_share=1.0, alternate=True, deep_first=True, patience=0.0
)


def equal_costs(count: int, transfer: int = 0) -> StageCosts:
    return StageCosts((1,) * count, (1,) * count, (1,) * count, transfer)


@given(NUMBERS)
def test_the_best_of_all_named_and_constructed_schedules_that_fit_is_chosen(number):
    draw = random.Random(number)
    stages, microbatches, chunks = draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 3)
    costs = drawn_costs(number, Placement("loop", stages, chunks))
    kept = [draw.choice([0.5, 1.0, 1.5]) for _ in range(stages * chunks)]
    limit = draw.uniform(1.5 * chunks, 1.5 * chunks * microbatches)
    search = search_schedule(stages, microbatches, costs, kept, limit)
    chosen = search.chosen
    schedule = chosen.schedule.validate()
    assert chosen.fits
    assert simulate(schedule, costs).length == chosen.length
    sizes = [
        [kept[schedule.virtual_stage(rank, chunk)] for chunk in range(chunks)]
        for rank in range(stages)
    ]
    check_peak(schedule, limit, sizes)
    check_runs(plan_transfers(schedule, costs))
    fitting = [candidate for candidate in search.named if candidate.fits]
    found = [(candidate.length, candidate.peak, candidate.schedule.rows) for candidate in fitting]
    for shape in ("loop", "v") if chunks > 1 else ("loop",):
        placement = Placement(shape, stages, chunks)
        for rule in _rules(placement, kept, limit, WEIGHT_HALF_SHARE, microbatches):
            greedy = GreedyConstruction(placement, microbatches, costs, rule)
            rows = greedy.rows()
            if rows is None:
                continue
            candidate = Schedule("auto", stages, microbatches, chunks, rows, shape=placement.shape)
            length = simulate(candidate, costs).length
            assert greedy.length == length, "the construction runs on the clock of the simulation"
            # The construction gives up if its step exceeds the limit, not if it equals the limit.
            limited = [
                GreedyConstruction(placement, microbatches, costs, rule, most).rows()
                for most in (length, length - 1)
            ]
            assert limited == [rows, None]
            found.append((length, max(stage_peaks(candidate, placement.by_stage(kept))), rows))
    best = min(range(len(found)), key=lambda index: found[index][:2])
    assert (chosen.length, chosen.peak, chosen.schedule.rows) == found[best]


@given(NUMBERS)
def test_greedy_construction_finishes_within_the_memory_of_one_microbatch(number):
    draw = random.Random(number)
    stages, chunks = draw.randint(1, 16), draw.randint(1, 4)
    placement = Placement(draw.choice(["loop", "v"]), stages, chunks)
    costs, count = drawn_costs(number, placement), stages * chunks
    rule = replace(
        RULE, limit=float(chunks), kept=(1.0,) * count, alternate=draw.choice([True, False])
    )
    microbatches = min(draw.randint(1, 64), max(1, 512 // count))
    rows = GreedyConstruction(placement, microbatches, costs, rule).rows()
    assert rows is not None
    schedule = Schedule("auto", stages, microbatches, chunks, rows, shape=placement.shape)
    assert simulate(schedule.validate(), costs).length > 0
    assert all(live_microbatches(schedule, rank).total <= chunks for rank in range(stages))


def test_unequal_stages_get_a_faster_schedule_than_any_named_schedule():
    costs = StageCosts((13, *(10,) * 6, 14), (*(12,) * 7, 18), (*(8,) * 7, 11), transfer=1)
    search = search_schedule(4, 16, costs, [1.0] * 8, 8.0)
    fits = {candidate.schedule.name: candidate.fits for candidate in search.named}
    assert fits == {"interleaved": False, "zb-v": True, "dualpipe-v": False}
    assert search.chosen.schedule.name == "auto"
    assert search.chosen.length < min(candidate.length for candidate in search.named)
    assert search.timeline.length == search.chosen.length


def test_too_little_memory_is_refused_with_the_smallest_limit_that_works():
    kept = [1.0, 2.0, 3.0, 5.0]
    too_little = (2, 4, equal_costs(4), kept, 5.5)
    check_refusals(search_schedule, [(too_little, "fullest stage keeps 6. Raise the limit")])
    assert search_schedule(2, 4, equal_costs(4), kept, 6.0).chosen.fits
    wrong = (2, 4, equal_costs(3), [1.0] * 3, 9.0)
    check_refusals(search_schedule, [(wrong, "costs name 3, kept names 3, pp is 2.")])


def test_split_backwards_keep_the_order_and_are_no_longer_than_full_backwards():
    for name, chunks in (("1f1b", 1), ("dualpipe-v", 2)):
        schedule = build_schedule(name, 4, 8, chunks)
        halves = in_halves(schedule).validate()
        assert {action.kind for row in halves.rows for action in row} == {"F", "I", "W"}
        # An input gradient is sent before the weight half runs, so no stage waits longer.
        assert simulate(halves).length <= simulate(schedule).length
        for rank in range(4):
            assert halves.order(rank) == schedule.order(rank)
