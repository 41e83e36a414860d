"""Schedules have Megatron-Core's order and every action once, and refuse sizes that cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import Action, Schedule, build_schedule, render, simulate

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "pipeline_orders.json").read_text(encoding="utf-8")
)["cases"]


def schedule_of_case(case: dict[str, Any]) -> Schedule:
    name = "1f1b" if case["vpp"] == 1 else "interleaved"
    return build_schedule(
        name, case["pp"], case["m"], case["vpp"], microbatch_group_size=case["group"]
    )


def is_all_warmup(order: str) -> bool:
    backwards = [word.startswith("-") for word in order.split()]
    return backwards == sorted(backwards)


def test_the_order_equals_megatron_core() -> None:
    for case in GOLDEN:
        schedule = schedule_of_case(case)
        orders = [" ".join(map(str, schedule.order(rank))) for rank in range(case["pp"])]
        assert orders == case["orders"], case
    assert len(GOLDEN) > 150
    assert any(case["group"] and case["group"] > case["pp"] for case in GOLDEN)
    assert any(
        is_all_warmup(order) for case in GOLDEN if case["vpp"] > 1 for order in case["orders"]
    )


def test_the_group_is_as_large_as_the_pipeline_by_default() -> None:
    assert build_schedule("interleaved", 2, 4, 2) == build_schedule(
        "interleaved", 2, 4, 2, microbatch_group_size=2
    )


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_every_microbatch_runs_forward_then_backward_on_every_stage(
    name: str, stages: int, microbatches: int, forward_only: bool
) -> None:
    schedule = build_schedule(name, stages, microbatches, forward_only=forward_only)
    for rank in range(stages):
        row = schedule.actions(rank)
        assert [action.microbatch for action in row if action.kind == "F"] == list(
            range(microbatches)
        )
        backwards = [action.microbatch for action in row if action.kind == "B"]
        assert backwards == ([] if forward_only else list(range(microbatches)))


def test_gpipe_runs_all_forwards_first() -> None:
    assert build_schedule("gpipe", 3, 3).order(1) == [1, 1, 1, -1, -1, -1]


def test_forward_only_visits_the_chunks_group_by_group() -> None:
    assert build_schedule("interleaved", 2, 4, 2, forward_only=True).order(1) == [
        1,
        1,
        2,
        2,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 8), (6, 6)])
def test_the_bubble_of_1f1b_equals_the_textbook_formula(stages: int, microbatches: int) -> None:
    bubble = simulate(build_schedule("1f1b", stages, microbatches)).bubble
    assert bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_chunks_divide_the_bubble() -> None:
    length = (
        simulate(build_schedule("1f1b", 4, 8)).length * 2
    )  # a chunk is half of the stage's layers
    assert length - 2 * 8 * 3 == 2 * (
        simulate(build_schedule("interleaved", 4, 8, 2)).length - 2 * 8 * 3
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("zb", 2, 2),
            "schedule must be 1f1b, interleaved, gpipe, zb-h1, zb-h2, zb-v or dualpipe-v: it is 'zb'.",
        ),
        (
            ("1f1b", 2, 0),
            (
                "num_microbatches must be a whole number of at least 1: it is 0. Use "
                "num_microbatches of 1 or"
            ),
        ),
        (("1f1b", 4, 8, 2), "schedule '1f1b' runs one chunk per stage: vpp is 2."),
        (("gpipe", 4, 8, 2), "Use schedule 'interleaved', or vpp of 1."),
        (("interleaved", 4, 8, 1), "schedule 'interleaved' needs vpp above 1: vpp is 1, and"),
        (("interleaved", 1, 8, 2), "schedule 'interleaved' needs pp above 1: pp is 1 with vpp 2"),
        (
            ("interleaved", 4, 3, 2),
            "schedule 'interleaved' needs at least as many microbatches as stages: num_microbatches is 3, pp is 4. A "
            "chunk would run its next microbatches before their inputs exist. Use 4 microbatches or more, or "
            "schedule '1f1b' with vpp of 1.",
        ),
        (
            ("interleaved", 4, 9, 2),
            "microbatch groups must have at least pp microbatches and at most all: microbatch_group_size is 4, pp is "
            "4, num_microbatches is 9; the last group would hold 1, fewer than the stages, and every stage would wait "
            "for it. Use microbatch_group_size of 5 or 9, or 12 microbatches.",
        ),
        (
            ("interleaved", 4, 9, 2, 3),
            "a smaller group would wait for its own output, and a larger one would never fill.",
        ),
        (("interleaved", 4, 9, 2, 10), "Use microbatch_group_size of 5 or 9, or 12 microbatches."),
        (
            ("zb-h1", 4, 8, 2),
            "schedule 'zb-h1' runs one chunk per stage: vpp is 2. It cannot order several chunks",
        ),
        (
            ("zb-v", 4, 8),
            "schedule 'zb-v' runs two chunks per stage: vpp is 1. The first chunks go from the first stage to the "
            "last in a V, and the second chunks go back. Use vpp of 2.",
        ),
        (
            ("dualpipe-v", 4, 7, 2),
            "schedule 'dualpipe-v' needs at least two microbatches per stage: num_microbatches is 7, pp is 4. With "
            "fewer, the two directions of the V would not overlap. Use 8 microbatches or more, or schedule 'zb-v'.",
        ),
        (("zb-v", 4, 8, 2, 4), "microbatch_group_size (4) belongs to schedule 'interleaved'"),
        (("1f1b", 4, 8, 1, 4), "microbatch_group_size (4) belongs to schedule 'interleaved'"),
    ],
)
def test_errors_of_impossible_schedules_give_the_rule_and_a_remedy(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ParallelPlanError) as error:
        build_schedule(*arguments)
    assert message in str(error.value)


F0, F1, B0, B1 = Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ((F0, B0, F1), "F of microbatch 1 in chunk 0 must come with B, or with I and W"),
        ((F0, B0, F0, F1, B1), "F of microbatch 0 in chunk 0 happens twice"),
        ((F0, B1, B0, F1), "B of microbatch 1 in chunk 0 happens before its F"),
        ((F0, Action("F", 1, 0)), "names a chunk or microbatch that does not exist"),
        ((F0, B0, F1, B1, Action("I", 0, 1)), "must come with B, or with I and W"),
    ],
)
def test_illegal_rows_of_a_schedule_are_refused(row: tuple[Action, ...], fault: str) -> None:
    with pytest.raises(ParallelPlanError, match=fault):
        Schedule("mine", 1, 2, 1, (row,)).validate()


def test_split_backwards_are_a_legal_schedule() -> None:
    halves = (F0, F1, Action("I", 0, 0), Action("I", 0, 1), Action("W", 0, 0), Action("W", 0, 1))
    schedule = Schedule("split", 2, 2, 1, (halves, halves)).validate()
    assert schedule.order(0) == [1, 1, -1, -1]
    assert simulate(schedule).length == 8


def test_stages_that_wait_for_each_other_raise() -> None:
    rows = ((F0, B0, F1, B1), (F1, B1, F0, B0))
    with pytest.raises(
        ParallelPlanError, match="its stages wait for each other. Stage 0 waits for the input of B"
    ):
        simulate(Schedule("crossed", 2, 2, 1, rows).validate())


def test_a_schedule_is_drawn_as_text() -> None:
    assert render(build_schedule("interleaved", 2, 2, 2)).splitlines() == [
        "        0   1   2   3   4   5   6   7   8   9   10  11  12  13  14",
        "stage 0 F0a F1a F0b F1b .   .   B0b --- .   B1b --- B0a --- B1a ---",
        "stage 1 .   F0a F1a F0b B0b --- F1b B1b --- B0a --- B1a --- .   .",
        "15 ticks, 20.0% of them waiting",
    ]
    assert (
        render(build_schedule("1f1b", 2, 2)).splitlines()[1] == "stage 0 F0 F1 .  .  B0 -- .  B1 --"
    )
