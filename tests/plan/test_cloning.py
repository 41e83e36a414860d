"""Plans of expert clones match worked examples, and keep their invariants for any counts."""

from __future__ import annotations

from collections import Counter

from lightning_megatron.plan.expert_clones import ExpertPlaces
from tests.clone_oracle import (
    ClonePlan,
    assign_largest_first,
    divide_over_ranks,
    excess_of_rank,
    overlaps,
    physical_experts,
    physical_place,
    plan_clones,
)
from tests.plan.clone_draws import DrawnCounts, drawn_counts, drawn_selections
from tests.sweeps import all_run

MANY = 1000 if all_run() else 120
COUNTS = [
    [45, 100, 22, 27, 37, 38, 30, 75],
    [45, 97, 23, 28, 38, 37, 30, 70],
    [45, 83, 22, 27, 37, 38, 30, 68],
    [45, 40, 23, 28, 38, 37, 30, 67],
]


def test_worked_examples_of_the_steps_of_a_plan():
    assert excess_of_rank([50, 100, 150, 200], 250) == [0, 0, 50, 200], "light experts stay"
    assert excess_of_rank([7, 7, 7], 10) == [0, 4, 7], "of equals the first stays"
    assert overlaps([100, 150], [80, 120]) == [[80, 20], [0, 100]]
    # Ranks send in proportion, and the first ranks send the remainder.
    assert divide_over_ranks([[30], [50], [20]], [0], [83]) == ((26,), (41,), (16,))


def test_the_largest_surplus_is_sent_to_the_largest_room():
    surplus, room = [0, 80, 0, 0, 50, 100, 0, 30], [0, 120, 60, 0]
    one_place = ExpertPlaces(num_ranks=4, num_experts=8, places=1)
    assert assign_largest_first(surplus, room, one_place)[1:3] == [(5, 100), (1, 60)]
    two_places = ExpertPlaces(num_ranks=4, num_experts=8, places=2)
    moved = [pair for pair in assign_largest_first(surplus, room, two_places) if pair[1]]
    assert moved == [(5, 100), (4, 20), (1, 60)]


def test_clones_balance_four_ranks_and_none_is_below_min_rows():
    plan = plan_clones(COUNTS, 1)
    assert (plan.owners, plan.amounts) == ((-1, 1, 7, -1), (0, 150, 50, 0))
    assert plan.off == ((0, 49, 15, 0), (0, 45, 12, 0), (0, 38, 12, 0), (0, 18, 11, 0))
    assert plan.rows == (350, 350, 350, 350)
    assert plan_clones(COUNTS, 1, min_rows=50) == plan
    plan = plan_clones(COUNTS, 1, min_rows=51)
    assert (plan.owners, plan.amounts) == ((-1, 1, -1, -1), (0, 150, 0, 0))
    assert plan.rows == (350, 350, 300, 400)
    assert not any(row[2] for row in plan.off)


def check_plan(drawn: DrawnCounts, plan: ClonePlan) -> None:
    counts, layout = drawn.counts, plan.layout
    homes, ranks = layout.homes, range(layout.num_ranks)
    totals = [sum(column) for column in zip(*counts, strict=True)]
    before = [sum(totals[rank * homes : (rank + 1) * homes]) for rank in ranks]
    mean = sum(totals) // layout.num_ranks
    moved = [0] * layout.num_experts
    for place, (owner, amount) in enumerate(zip(plan.owners, plan.amounts, strict=True)):
        assert (owner == -1) == (amount == 0)
        if owner == -1:
            assert not any(row[place] for row in plan.off)
            continue
        assert amount >= max(drawn.min_rows, 1)
        assert owner // homes != place // layout.places, "a clone beside its home"
        assert sum(row[place] for row in plan.off) == amount
        moved[owner] += amount
    clones = [(o, place // layout.places) for place, o in enumerate(plan.owners) if o != -1]
    assert len(set(clones)) == len(clones), "two clones of one expert on a rank"
    for rank, load in enumerate(before):
        excess = excess_of_rank(totals[rank * homes : (rank + 1) * homes], mean)
        assert sum(excess) == max(0, load - mean)
        for expert, over in enumerate(excess, rank * homes):
            assert moved[expert] <= over <= totals[expert]
        places = slice(rank * layout.places, (rank + 1) * layout.places)
        assert sum(plan.amounts[places]) <= max(0, mean - load)
    for row, count in zip(plan.off, counts, strict=True):
        sent = [0] * layout.num_experts
        for owner, number in zip(plan.owners, row, strict=True):
            assert number >= 0
            sent[owner] += number
        assert all(rows <= available for rows, available in zip(sent, count, strict=True))
    assert sum(plan.rows) == sum(before)
    assert max(plan.rows) <= max(before)


def test_plans_of_any_counts_keep_their_invariants_and_enough_places_balance_all_ranks():
    num_moved = 0
    for drawn in drawn_counts(MANY):
        plan = plan_clones(drawn.counts, drawn.places, drawn.min_rows)
        check_plan(drawn, plan)
        num_moved += any(plan.amounts)
        layout = ExpertPlaces(len(drawn.counts), len(drawn.counts[0]), 1)
        plan = plan_clones(drawn.counts, layout.num_experts - layout.homes)
        assert max(plan.rows) - sum(plan.rows) // layout.num_ranks < layout.num_ranks
    assert num_moved > 0.4 * MANY, "hardly any plan moves anything"


def test_physical_experts_map_back_and_have_the_rows_of_the_plan():
    for drawn in drawn_selections(60):
        plan = plan_clones(drawn.counts, drawn.places)
        rows = Counter[int]()
        for rank, selections in enumerate(drawn.selections):
            tokens = physical_experts(selections, plan, rank)
            assert [[plan.logical(expert) for expert in token] for token in tokens] == selections
            physical = [expert for token in tokens for expert in token if expert != -1]
            for place, number in enumerate(plan.off[rank]):
                assert physical.count(physical_place(plan.layout, place)) == number
            rows.update(expert // (plan.layout.homes + plan.layout.places) for expert in physical)
        assert tuple(rows[rank] for rank in range(plan.layout.num_ranks)) == plan.rows
