"""Plans of expert clones match worked examples, and keep their invariants for any counts."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.clone_cost import CloneCost
from lightning_megatron.plan.cloning import (
    ClonePlan,
    ExpertPlaces,
    assign_largest_first,
    assign_one_shot,
    divide_over_ranks,
    excess_of_rank,
    overlaps,
    physical_experts,
    plan_clones,
)
from tests.plan.clone_draws import DrawnCounts, drawn_counts, drawn_selections

COUNTS = [
    [45, 100, 22, 27, 37, 38, 30, 75],
    [45, 97, 23, 28, 38, 37, 30, 70],
    [45, 83, 22, 27, 37, 38, 30, 68],
    [45, 40, 23, 28, 38, 37, 30, 67],
]


def test_light_experts_keep_their_rows_in_any_order() -> None:
    assert excess_of_rank([50, 100, 150, 200], 250) == [0, 0, 50, 200]
    assert excess_of_rank([200, 50, 150, 100], 250) == [200, 0, 50, 0]
    assert excess_of_rank([7, 7, 7], 10) == [0, 4, 7], "of equals the first stays"
    assert excess_of_rank([20, 5], 0) == [20, 5]


def test_overlaps_are_the_common_lengths_of_intervals_of_two_lines() -> None:
    assert overlaps([100, 150], [80, 120]) == [[80, 20], [0, 100]]


def test_both_assignments_send_the_largest_surplus_to_the_largest_room() -> None:
    surplus, room = [0, 80, 0, 0, 50, 100, 0, 30], [0, 120, 60, 0]
    one_place = ExpertPlaces(num_ranks=4, num_experts=8, places=1)
    two_places = ExpertPlaces(num_ranks=4, num_experts=8, places=2)
    for assign in (assign_one_shot, assign_largest_first):
        assignment = assign(surplus, room, one_place)
        assert [assignment[1], assignment[2]] == [(5, 100), (1, 60)]
        assert not any(amount for _, amount in (assignment[0], assignment[3]))
    assert [
        assignment for assignment in assign_one_shot(surplus, room, two_places) if assignment[1]
    ] == [
        *((5, 100), (1, 20)),
        (1, 60),
    ]
    assert [
        assignment
        for assignment in assign_largest_first(surplus, room, two_places)
        if assignment[1]
    ] == [
        *((5, 100), (4, 20)),
        (1, 60),
    ]


@pytest.mark.parametrize(("amount", "off"), [(80, [24, 40, 16]), (83, [26, 41, 16])])
def test_ranks_send_in_proportion_and_the_first_ranks_send_the_remainder(
    amount: int, off: list[int]
) -> None:
    assert divide_over_ranks([[30], [50], [20]], [0], [amount]) == tuple(
        (number,) for number in off
    )


def test_clones_balance_four_ranks() -> None:
    plan = plan_clones(COUNTS, 1)
    assert plan.owners == (-1, 1, 7, -1)
    assert plan.amounts == (0, 150, 50, 0)
    assert plan.off == ((0, 49, 15, 0), (0, 45, 12, 0), (0, 38, 12, 0), (0, 18, 11, 0))
    assert plan.rows == (350, 350, 350, 350)


def test_clones_below_min_rows_are_not_made() -> None:
    assert plan_clones(COUNTS, 1, min_rows=50) == plan_clones(COUNTS, 1)
    plan = plan_clones(COUNTS, 1, min_rows=51)
    assert plan.owners == (-1, 1, -1, -1)
    assert plan.amounts == (0, 150, 0, 0)
    assert plan.rows == (350, 350, 300, 400)
    assert not any(row[2] for row in plan.off)


def test_the_first_selections_in_the_order_of_tokens_move_to_clones() -> None:
    layout = ExpertPlaces(num_ranks=4, num_experts=8, places=1)
    off = ((0, 3, 1, 0),) * 4
    plan = ClonePlan(layout, (-1, 1, 7, -1), (0, 12, 4, 0), off, (0,) * 4)
    actual = physical_experts([[1, 7], [1, 0], [7, 1], [2, -1], [1, 3], [7, 6]], plan, 0)
    assert actual == ((5, 8), (5, 0), (10, 5), (3, -1), (1, 4), (10, 9))


def check_plan(drawn: DrawnCounts, plan: ClonePlan) -> None:
    counts, layout = drawn.counts, plan.layout
    totals = [sum(column) for column in zip(*counts, strict=True)]
    before = [
        sum(totals[rank * layout.homes : (rank + 1) * layout.homes])
        for rank in range(layout.num_ranks)
    ]
    mean = sum(totals) // layout.num_ranks
    moved = [0] * layout.num_experts
    for place, (owner, amount) in enumerate(zip(plan.owners, plan.amounts, strict=True)):
        assert (owner == -1) == (amount == 0)
        if owner == -1:
            assert not any(row[place] for row in plan.off)
            continue
        assert amount >= max(drawn.min_rows, 1)
        assert owner // layout.homes != place // layout.places, "a clone beside its home"
        assert sum(row[place] for row in plan.off) == amount
        moved[owner] += amount
    places_of_ranks = Counter(
        (owner, place // layout.places) for place, owner in enumerate(plan.owners) if owner != -1
    )
    assert set(places_of_ranks.values()) <= {1}, "two clones of one expert on a rank"
    for rank, load in enumerate(before):
        excess = excess_of_rank(totals[rank * layout.homes : (rank + 1) * layout.homes], mean)
        assert sum(excess) == max(0, load - mean)
        for expert, over in enumerate(excess, rank * layout.homes):
            assert moved[expert] <= over <= totals[expert]
        rank_places = slice(rank * layout.places, (rank + 1) * layout.places)
        assert sum(plan.amounts[rank_places]) <= max(0, mean - load)
    for row, count in zip(plan.off, counts, strict=True):
        sent = [0] * layout.num_experts
        for owner, number in zip(plan.owners, row, strict=True):
            assert number >= 0
            sent[owner] += number
        assert all(sent_rows <= available for sent_rows, available in zip(sent, count, strict=True))
    assert sum(plan.rows) == sum(before)
    assert max(plan.rows) <= max(before)


def test_plans_of_any_counts_keep_their_invariants() -> None:
    num_moved = 0
    for drawn in drawn_counts(1000):
        plan = plan_clones(drawn.counts, drawn.places, drawn.min_rows)
        check_plan(drawn, plan)
        check_plan(drawn, plan_clones(drawn.counts, drawn.places, drawn.min_rows, assign_one_shot))
        num_moved += any(plan.amounts)
    assert num_moved > 400, "hardly any plan moves anything"


def test_enough_places_balance_all_ranks() -> None:
    for drawn in drawn_counts(200):
        layout = ExpertPlaces(len(drawn.counts), len(drawn.counts[0]), 1)
        plan = plan_clones(drawn.counts, layout.num_experts - layout.homes)
        assert max(plan.rows) - sum(plan.rows) // layout.num_ranks < layout.num_ranks


def test_physical_experts_map_back_and_have_the_rows_of_the_plan() -> None:
    for drawn in drawn_selections(150):
        plan = plan_clones(drawn.counts, drawn.places)
        rows = Counter[int]()
        for rank, selections in enumerate(drawn.selections):
            physical_of_tokens = physical_experts(selections, plan, rank)
            assert [
                [plan.logical(expert) for expert in token] for token in physical_of_tokens
            ] == selections
            physical = [expert for token in physical_of_tokens for expert in token if expert != -1]
            for place, number in enumerate(plan.off[rank]):
                assert physical.count(plan.layout.physical_place(place)) == number
            rows.update(expert // (plan.layout.homes + plan.layout.places) for expert in physical)
        assert tuple(rows[rank] for rank in range(plan.layout.num_ranks)) == plan.rows


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 6, 1), r"num_experts \(6\) must be a multiple of num_ranks \(4\)"),
        ((4, 8, 7), r"places \(7\) must be at most 6"),
        ((1, 8, 1), r"places \(1\) must be at most 0"),
        ((4, 8, 0), "places must be a whole number of at least 1: it is 0"),
    ],
)
def test_invalid_sizes_of_expert_places_are_refused(
    sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        ExpertPlaces(*sizes)


@pytest.mark.parametrize(
    ("sends_again", "gradient", "rows"),
    [
        (False, 2, (1200, 857, 1733, 1238)),
        (False, 4, (1800, 1286, 2600, 1857)),
        (True, 4, (2400, 1714, 3467, 2476)),
    ],
)
def test_the_fewest_rows_of_a_clone_follow_from_speeds(
    sends_again: bool, gradient: int, rows: tuple[int, ...]
) -> None:
    speeds = [(450e12, 250e9), (450e12, 350e9), (650e12, 250e9), (650e12, 350e9)]
    costs = [
        CloneCost(products=products, bandwidth=links, gradient=gradient, sends_again=sends_again)
        for products, links in speeds
    ]
    assert tuple(cost.min_rows for cost in costs) == rows


@pytest.mark.parametrize("name", ["products", "bandwidth"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_speeds_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ParallelPlanError, match=f"{name} must be a positive speed"):
        CloneCost(**{"products": 1.0, "bandwidth": 1.0, name: value})


def test_bytes_of_a_clone_must_be_positive() -> None:
    with pytest.raises(ParallelPlanError, match="gradient must be a whole number"):
        CloneCost(products=1.0, bandwidth=1.0, gradient=0)


def test_clones_save_time_beyond_the_break_even() -> None:
    cost = CloneCost(products=650e12, bandwidth=350e9)
    size = 3 * 2048 * 768
    transfers = 8 * size / 350e9
    assert cost.seconds_saved(0, 2, size) == pytest.approx(-2 * transfers)
    assert abs(cost.seconds_saved(cost.min_rows, 1, size)) < 1e-3 * transfers
    assert cost.seconds_saved(3 * cost.min_rows, 2, size) == pytest.approx(transfers, rel=1e-3)
