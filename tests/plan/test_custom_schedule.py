"""A custom schedule runs if, and only if, its actions can be put in one order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import (
    Action,
    Compute,
    Placement,
    Schedule,
    StageCosts,
    custom_schedule,
    live_microbatches,
    plan_transfers,
    simulate,
)
from lightning_megatron.plan.zero_bubble import zero_bubble_row
from tests.plan.test_split_schedules import run_one_by_one
from tests.plan.test_transfers import execute

MANY = settings(max_examples=100, deadline=None, database=None)
Rows = list[list[Action]]
Node = tuple[int, Action]


def needs_of(
    placement: Placement, microbatches: int, split: set[tuple[int, int]]
) -> dict[Node, set[Node]]:
    """Return the actions that each action of a step needs. Backwards of the pairs of a virtual
    stage and a microbatch in `split` are split.
    """
    last = placement.num_virtual_stages - 1

    def node(kind: str, virtual: int, number: int) -> Node:
        rank, chunk = placement.owner(virtual)
        name = "I" if kind == "B" and (virtual, number) in split else kind
        return rank, Action(name, chunk, number)  # type: ignore[arg-type]

    needs: dict[Node, set[Node]] = {}
    for virtual in range(last + 1):
        for number in range(microbatches):
            forward = node("F", virtual, number)
            backward = node("B", virtual, number)
            needs[forward] = {node("F", virtual - 1, number)} if virtual else set()
            needs[backward] = {forward}
            if virtual < last:
                needs[backward].add(node("B", virtual + 1, number))
            if backward[1].kind == "I":
                needs[node("W", virtual, number)] = {backward}
    return needs


@st.composite
def random_rows(draw: st.DrawFn) -> tuple[Placement, int, Rows, dict[Node, set[Node]]]:
    """Draw rows from a random order of all actions in which each follows the actions it needs."""
    shape = draw(st.sampled_from(["loop", "v"]))
    placement = Placement(shape, draw(st.integers(1, 6)), draw(st.integers(1, 4)))  # type: ignore[arg-type]
    microbatches = draw(st.integers(1, 6))
    draws = random.Random(draw(st.integers(0, 2**32)))
    pairs = [(v, n) for v in range(placement.num_virtual_stages) for n in range(microbatches)]
    share = draws.choice([0.0, 0.5, 1.0])
    split = {pair for pair in pairs if draws.random() < share}
    needs = needs_of(placement, microbatches, split)
    rows: Rows = [[] for _ in range(placement.num_stages)]
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    ready: list[Node] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        rank, action = ready.pop(draws.randrange(len(ready)))
        rows[rank].append(action)
        sorter.done((rank, action))
    return placement, microbatches, rows, needs


def schedule_of(placement: Placement, microbatches: int, rows: Rows) -> Schedule:
    sizes = (placement.num_stages, microbatches, placement.num_chunks)
    return custom_schedule(lambda rank, *_: rows[rank], *sizes, shape=placement.shape, name="mine")


def can_run(rows: Rows, needs: dict[Node, set[Node]]) -> bool:
    graph = {node: set(before) for node, before in needs.items()}
    for rank, row in enumerate(rows):
        for before, after in pairwise(row):
            graph[rank, after].add((rank, before))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@seed(17)
@MANY
@given(random_rows(), st.integers(0, 2**32))
def test_any_order_in_which_actions_follow_the_actions_they_need_runs(
    drawn: tuple[Placement, int, Rows, dict[Node, set[Node]]], number: int
) -> None:
    placement, microbatches, rows, _ = drawn
    schedule = schedule_of(placement, microbatches, rows)
    draws = random.Random(number)
    times = [
        tuple(draws.randint(1, 9) for _ in range(placement.num_virtual_stages)) for _ in range(3)
    ]
    for costs in ({"F": 1, "B": 2, "I": 1, "W": 1}, StageCosts(*times, draws.randint(0, 3))):
        program = plan_transfers(schedule, costs)
        for rank in execute(program):
            assert rank.next == len(rank.instructions), f"stage {rank.rank} is stuck"
            assert not rank.held, f"stage {rank.rank} received what it never used"
            computed = [step.action for step in rank.instructions if isinstance(step, Compute)]
            assert computed == rows[rank.rank]
        assert run_one_by_one(program)


@seed(17)
@MANY
@given(random_rows(), st.integers(0, 2**32))
def test_a_shuffled_schedule_is_refused_unless_it_can_run(
    drawn: tuple[Placement, int, Rows, dict[Node, set[Node]]], number: int
) -> None:
    placement, microbatches, rows, needs = drawn
    draws = random.Random(number)
    row = draws.choice(rows)
    for _ in range(draws.randint(1, 3)):
        first, second = draws.randrange(len(row)), draws.randrange(len(row))
        row[first], row[second] = row[second], row[first]
    if can_run(rows, needs):
        schedule = schedule_of(placement, microbatches, rows)
        assert run_one_by_one(plan_transfers(schedule))
    else:
        with pytest.raises(ParallelPlanError, match=r"happens before its|wait for each other"):
            schedule_of(placement, microbatches, rows)


@seed(17)
@MANY
@given(random_rows(), st.integers(0, 2**32))
def test_a_schedule_that_lacks_or_repeats_an_action_is_refused(
    drawn: tuple[Placement, int, Rows, dict[Node, set[Node]]], number: int
) -> None:
    placement, microbatches, rows, _ = drawn
    draws = random.Random(number)
    row = draws.choice(rows)
    position = draws.randrange(len(row))
    if draws.random() < 0.5:
        row.insert(draws.randrange(len(row)), row[position])
    else:
        del row[position]
    with pytest.raises(ParallelPlanError, match=r"schedule 'mine' is not legal: on stage \d"):
        schedule_of(placement, microbatches, rows)


def test_a_function_gives_the_name_and_rows_of_a_custom_schedule() -> None:
    def eager(rank: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Iterable:
        return zero_bubble_row(rank, num_stages, num_microbatches, lead=3)

    schedule = custom_schedule(eager, 4, 12)
    assert schedule.name == "eager"
    assert simulate(schedule).length > 0
    assert [live_microbatches(schedule, rank).total for rank in range(4)] == [10] * 4


def endless(rank: int, *sizes: int) -> Iterator[Action]:
    yield from (Action("F", 0, number % 2) for number in count())


F0, F1, B0, B1 = Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)
ONCE = "A stage runs each microbatch of each chunk once: F, then B, or I and later W in place of B."


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "the row must be a sequence of actions: the function returned None. Use a list of"),
        (
            [("F", 0, 0)],
            "a row must consist of actions whose chunk and microbatch are whole numbers",
        ),
        ([Action("F", 0, 1.0)], "it has Action(kind='F', chunk=0, microbatch=1.0)"),  # type: ignore[arg-type]
        ([Action("F", True, 1)], "Use Action(kind, chunk, microbatch)."),
        (
            [Action("G", 0, 0)],  # type: ignore[arg-type]
            "on stage 0, G of microbatch 0 in chunk 0 is of no kind that exists. Use F, B, I or W.",
        ),
        (
            [F0, Action("F", 0, 2)],
            "F of microbatch 2 in chunk 0 names a chunk or microbatch that does not exist. Use "
            "chunks of 0 to 0 and microbatches of 0 to 1.",
        ),
        ([B0, F0, F1, B1], f"B of microbatch 0 in chunk 0 happens before its F. {ONCE}"),
        (
            [F0, B0, F1, B1, Action("I", 0, 0)],
            "F of microbatch 0 in chunk 0 must come with B, or with I and W: found F, B, I.",
        ),
        (
            [F0, B0],
            "F of microbatch 1 in chunk 0 must come with B, or with I and W: found nothing",
        ),
        (endless(0), f"F of microbatch 0 in chunk 0 happens twice. {ONCE}"),
    ],
)
def test_errors_of_illegal_rows_name_the_reason(row: Any, message: str) -> None:
    with pytest.raises(ParallelPlanError) as error:
        custom_schedule(lambda *_: row, 1, 2, name="mine")
    assert message in str(error.value)
    assert str(error.value).startswith("schedule 'mine'")


def test_a_forward_only_schedule_runs_without_backwards() -> None:
    schedule = custom_schedule(lambda *_: [F1, F0], 2, 2, forward_only=True)
    assert simulate(schedule).length == 3
    with pytest.raises(ParallelPlanError, match=r"A stage without backwards runs each microbatch"):
        custom_schedule(lambda *_: [F0, F1, B1, B0], 2, 2, forward_only=True)


def test_a_deadlock_names_the_stages_that_wait_for_each_other() -> None:
    rows = [[F0, F1, B0, B1], [F0, B0, F1, B1], [F1, B1, F0, B0]]
    with pytest.raises(ParallelPlanError) as error:
        custom_schedule(lambda rank, *_: rows[rank], 3, 2, name="crossed")
    assert str(error.value) == (
        "schedule 'crossed' is not legal: its stages wait for each other. Stage 1 "
        "waits for the input of B of microbatch 0 in chunk 0 from stage 2, stage 2 waits for the "
        "input of F of microbatch 1 in chunk 0 from stage 1. Order the actions so that a stage "
        "computes what other stages wait for before it waits for them."
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2), "pp must be a whole number of at least 1: it is 0"),
        ((2, 0), "num_microbatches must be a whole number of at least 1: it is 0"),
        ((2, 2, 0), "vpp must be a whole number of at least 1: it is 0"),
    ],
)
def test_sizes_below_one_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        custom_schedule(endless, *sizes)  # type: ignore[arg-type]
