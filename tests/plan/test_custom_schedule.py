"""Schedules from functions run if, and only if, their actions have one order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, repeat

import pytest
from hypothesis import given

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import (
    Action,
    Schedule,
    custom_schedule,
)
from lightning_megatron.plan.custom_schedule import CustomOrder
from lightning_megatron.plan.microbatches import MicrobatchRule
from tests.plan.pipelines import (
    NUMBERS,
    DrawnRows,
    check_runs,
    drawn_rows,
)
from tests.refusals import check_refusals


@given(NUMBERS)
def test_any_order_in_which_actions_follow_the_actions_they_need_runs(number):
    drawn = drawn_rows(number)
    schedule = drawn.schedule()
    assert [list(row) for row in schedule.rows] == drawn.rows
    check_runs(schedule)


def can_run(drawn: DrawnRows) -> bool:
    graph = {node: set(before) for node, before in drawn.needs.items()}
    for rank, row in enumerate(drawn.rows):
        for before, after in pairwise(row):
            graph[rank, after].add((rank, before))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@given(NUMBERS)
def test_a_shuffled_schedule_is_refused_unless_it_can_run(number):
    drawn, draw = drawn_rows(number), random.Random(number)
    row = draw.choice(drawn.rows)
    for _ in range(draw.randint(1, 3)):
        first, second = draw.randrange(len(row)), draw.randrange(len(row))
        row[first], row[second] = row[second], row[first]
    if can_run(drawn):
        check_runs(drawn.schedule())
    else:
        with pytest.raises(ParallelPlanError, match=r"happens before its|wait for each other"):
            drawn.schedule()


def last_first(rank: int, pp: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards from the last microbatch on, for even numbers."""
    if num_microbatches % 2:
        raise ZeroDivisionError("odd")
    yield from (Action("F", 0, number) for number in range(num_microbatches))
    yield from (Action("B", 0, number) for number in reversed(range(num_microbatches)))


F0, F1, B0, B1 = Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)


def test_illegal_rows_are_refused_with_the_reason():
    check_refusals(
        lambda row: custom_schedule(lambda *_: row, 1, 2, name="mine"),
        [
            ((None,), "the row must be a sequence of actions: the function returned None"),
            (([("F", 0, 0)],), "whose chunk and microbatch are whole numbers"),
            (([Action("F", 0, 1.0)],), "it has Action(kind='F', chunk=0, microbatch=1.0)"),
            (([Action("G", 0, 0)],), "is of no kind that exists. Use F, B, I or W."),
            (([F0, Action("F", 0, 2)],), "Use chunks of 0 to 0 and microbatches of 0 to 1."),
            (([B0, F0, F1, B1],), "B of microbatch 0 in chunk 0 happens before its F."),
            (([F0, B0, F1],), "on stage 0"),
            (([F0, B0, F1, B1, Action("I", 0, 0)],), "must come with B, or with I and W: found"),
            ((repeat(F0),), "F of microbatch 0 in chunk 0 happens twice."),
        ],
    )
    sizes = [((0, 2), "num_stages must be"), ((2, 0), "num_microbatches must be")]
    check_refusals(lambda *given: custom_schedule(last_first, *given), sizes)
    with pytest.raises(ParallelPlanError, match="A stage without backwards runs each microbatch"):
        Schedule("mine", 1, 2, 1, ((F0, F1, B1, B0),), forward_only=True).validate()


def test_a_deadlock_names_the_stages_that_wait_for_each_other():
    rows = [[F0, F1, B0, B1], [F0, B0, F1, B1], [F1, B1, F0, B0]]
    with pytest.raises(
        ParallelPlanError,
        match="Stage 1 waits for the input of B of microbatch 0 in chunk 0 from stage 2, stage 2 "
        "waits for the input of F of microbatch 1 in chunk 0 from stage 1. Order the actions so",
    ):
        custom_schedule(lambda rank, *_: rows[rank], 3, 2, name="crossed")


def test_a_function_runs_every_number_of_microbatches_that_it_supports():
    order = CustomOrder.of(last_first, 4, 1)
    assert order.build(6) is order.build(6), "the function is called once for each number"
    assert order.build(6).rows[3][-1] == Action("B", 0, 0)
    check_refusals(order.build, [((5,), "and vpp 1 it raised ZeroDivisionError: odd")])
    assert order.build(5, forward_only=True).num_microbatches == 5


def test_the_default_number_of_microbatches_follows_from_the_order():
    rule = MicrobatchRule(None, CustomOrder.of(last_first, 2, 1), 2, 1, None)
    # Four are the fewest microbatches with which stages are idle for at most a fifth of a step.
    assert (rule.count_for(12), rule.count_for(9)) == (4, 9)
    check_refusals(rule.check, [((9,), "it raised ZeroDivisionError")])
