"""A searched schedule is legal, fits in memory, and no named schedule that fits is faster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
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
from lightning_megatron.plan.live_microbatches import (
    WEIGHT_HALF_SHARE,
    check_peak,
    stage_peaks,
)
from tests.plan.test_split_schedules import run_one_by_one

RULE = GreedyRule(
    limit=4.0, kept=(), weight_half_share=1.0, alternate=True, deep_first=True, patience=0.0
)


def equal_costs(count: int, forward: int, half: int, weight: int, transfer: int = 0) -> StageCosts:
    return StageCosts((forward,) * count, (half,) * count, (weight,) * count, transfer)


@seed(17)
@settings(max_examples=25, deadline=None, database=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32))
def test_a_searched_schedule_fits_and_no_fitting_named_schedule_is_faster(
    stages: int, microbatches: int, chunks: int, number: int
) -> None:
    draws = random.Random(number)
    count = stages * chunks
    times = [tuple(draws.randint(1, 9) for _ in range(count)) for _ in range(3)]
    costs = StageCosts(*times, transfer=draws.randint(0, 2))
    kept = [draws.choice([0.5, 1.0, 1.5]) for _ in range(count)]
    # The limit lies between the memory of one microbatch and the memory of all microbatches.
    limit = draws.uniform(1.5 * chunks, 1.5 * chunks * microbatches)
    search = search_schedule(stages, microbatches, costs, kept, limit)
    schedule = search.chosen.schedule.validate()
    assert search.chosen.fits
    assert simulate(schedule, costs).length == search.chosen.length
    assert all(
        search.chosen.length <= candidate.length for candidate in search.named if candidate.fits
    )
    sizes = [
        [kept[schedule.virtual_stage(rank, chunk)] for chunk in range(chunks)]
        for rank in range(stages)
    ]
    check_peak(schedule, limit, sizes)
    assert run_one_by_one(plan_transfers(schedule, costs))
    assert run_one_by_one(plan_transfers(schedule))


@seed(17)
@settings(max_examples=25, deadline=None, database=None)
@given(
    st.integers(1, 16),
    st.integers(1, 64),
    st.integers(1, 4),
    st.sampled_from(["loop", "v"]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_greedy_construction_finishes_within_the_memory_of_one_microbatch(
    stages: int, microbatches: int, chunks: int, shape: str, alternate: bool, number: int
) -> None:
    draws = random.Random(number)
    count = stages * chunks
    costs = StageCosts(
        *(tuple(draws.randint(1, 5) for _ in range(count)) for _ in range(3)), transfer=1
    )
    rule = replace(RULE, limit=float(chunks), kept=(1.0,) * count, alternate=alternate)
    placement = Placement(shape, stages, chunks)  # type: ignore[arg-type]
    microbatches = min(microbatches, max(1, 512 // count))
    rows = GreedyConstruction(placement, microbatches, costs, rule).rows()
    assert rows is not None
    schedule = Schedule(
        "auto", stages, microbatches, chunks, rows, shape=placement.shape
    ).validate()
    assert simulate(schedule, costs).length > 0
    assert all(live_microbatches(schedule, rank).total <= chunks for rank in range(stages))


@seed(17)
@settings(max_examples=25, deadline=None, database=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32))
def test_a_search_chooses_the_best_of_all_constructed_and_simulated_rules(
    stages: int, microbatches: int, chunks: int, number: int
) -> None:
    draws = random.Random(number)
    count = stages * chunks
    times = [tuple(draws.randint(1, 4) for _ in range(count)) for _ in range(3)]
    costs = StageCosts(*times, transfer=draws.randint(0, 2))
    kept = [draws.choice([0.5, 1.0]) for _ in range(count)]
    limit = draws.uniform(chunks, chunks * microbatches)
    search = search_schedule(stages, microbatches, costs, kept, limit)
    keys = [(candidate.length, candidate.peak) for candidate in search.named if candidate.fits]
    rows = [candidate.schedule.rows for candidate in search.named if candidate.fits]
    for shape in ("loop", "v") if chunks > 1 else ("loop",):
        placement = Placement(shape, stages, chunks)  # type: ignore[arg-type]
        for rule in _rules(placement, kept, limit, WEIGHT_HALF_SHARE, microbatches):
            greedy = GreedyConstruction(placement, microbatches, costs, rule)
            greedy_rows = greedy.rows()
            if greedy_rows is None:
                continue
            schedule = Schedule(
                "auto", stages, microbatches, chunks, greedy_rows, shape=placement.shape
            )
            length = simulate(schedule, costs).length
            assert greedy.length == length, "the construction runs on the clock of the simulation"
            # The construction gives up if its step exceeds the limit, not if it equals the limit.
            limited = GreedyConstruction(placement, microbatches, costs, rule, length)
            assert limited.rows() == greedy_rows
            assert (
                GreedyConstruction(placement, microbatches, costs, rule, length - 1).rows() is None
            )
            keys.append((length, max(stage_peaks(schedule, placement.by_stage(kept)))))
            rows.append(greedy_rows)
    best = min(range(len(keys)), key=keys.__getitem__)
    assert (search.chosen.length, search.chosen.peak) == keys[best]
    assert search.chosen.schedule.rows == rows[best]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_greedy_construction_finds_zero_bubble_at_equal_times(stages: int) -> None:
    microbatches = 3 * stages
    costs = equal_costs(stages, 1, 1, 1)
    search = search_schedule(stages, microbatches, costs, [1.0] * stages, 2 * stages - 1)
    best = simulate(build_schedule("zb-h2", stages, microbatches), costs).length
    assert search.chosen.length == best
    # The last stage starts after the forwards of the other stages, and then never waits.
    assert best == 3 * microbatches + stages - 1


def test_unequal_stages_get_a_faster_schedule_than_any_named_schedule() -> None:
    costs = StageCosts(
        (13, 10, 10, 10, 10, 10, 10, 14),
        (12, 12, 12, 12, 12, 12, 12, 18),
        (8, 8, 8, 8, 8, 8, 8, 11),
        transfer=1,
    )
    search = search_schedule(4, 16, costs, [1.0] * 8, 8.0)
    assert [candidate.schedule.name for candidate in search.named] == [
        "interleaved",
        "zb-v",
        "dualpipe-v",
    ]
    assert [candidate.fits for candidate in search.named] == [False, True, False]
    assert search.chosen.schedule.name == "auto"
    assert search.chosen.length < min(candidate.length for candidate in search.named)
    assert search.timeline.length == search.chosen.length


def test_a_single_stage_gets_1f1b() -> None:
    search = search_schedule(1, 4, equal_costs(1, 1, 1, 1), [1.0], 1.0)
    assert search.chosen.schedule.name == "1f1b"


def test_only_the_given_placement_shapes_are_searched() -> None:
    search = search_schedule(4, 8, equal_costs(8, 1, 1, 1), [1.0] * 8, 99.0, shapes=("loop",))
    assert search.chosen.schedule.shape == "loop"
    assert [candidate.schedule.name for candidate in search.named] == ["interleaved"]


def test_the_error_for_too_little_memory_gives_the_smallest_limit_that_works() -> None:
    with pytest.raises(ParallelPlanError) as error:
        search_schedule(2, 4, equal_costs(4, 1, 1, 1), [1.0, 2.0, 3.0, 5.0], 5.5)
    assert str(error.value) == (
        "activations must fit into memory: the limit is 5.5, one microbatch in all chunks of the "
        "fullest stage keeps 6. Raise the limit to at least that, or use smaller microbatches."
    )
    assert search_schedule(2, 4, equal_costs(4, 1, 1, 1), [1.0, 2.0, 3.0, 5.0], 6.0).chosen.fits


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(
        ParallelPlanError,
        match=r"costs name 3, kept names 3, pp is 2\. Use lists of pp x vpp values",
    ):
        search_schedule(2, 4, equal_costs(3, 1, 1, 1), [1.0] * 3, 9.0)


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)]
)
def test_split_backwards_keep_the_order_and_are_no_longer_than_full_backwards(
    name: str, chunks: int
) -> None:
    schedule = build_schedule(name, 4, 8, chunks)
    halves = in_halves(schedule).validate()
    kinds = {action.kind for row in halves.rows for action in row}
    assert kinds == {"F", "I", "W"}
    assert [halves.order(rank) for rank in range(4)] == [schedule.order(rank) for rank in range(4)]
    # An input gradient is sent before the weight half runs, so no stage waits longer.
    assert simulate(halves).length <= simulate(schedule).length
    for rank in range(4):
        slots = live_microbatches(schedule, rank).slots
        assert live_microbatches(halves, rank).slots == slots
