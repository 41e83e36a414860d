"""Schedules from functions and CSV files run if, and only if, their actions have one order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan import (
    Action,
    Placement,
    build_schedule,
    custom_schedule,
    format_schedule,
    parse_schedule,
    plan_transfers,
    read_schedule,
    simulate,
)
from lightning_megatron.plan.custom_order import (
    CustomOrder,
    order_from_file,
    order_from_function,
    order_may_split,
    shape_of_order,
)
from lightning_megatron.plan.microbatches import MicrobatchRule
from tests.plan.pipelines import (
    NUMBERS,
    DrawnRows,
    check_runs,
    drawn_costs,
    drawn_rows,
    drawn_schedule,
)
from tests.refusals import check_refusals


@given(NUMBERS)
def test_any_order_in_which_actions_follow_the_actions_they_need_runs(number):
    drawn = drawn_rows(number)
    schedule = drawn.schedule()
    assert [list(row) for row in schedule.rows] == drawn.rows
    for costs in ({"F": 1, "B": 2, "I": 1, "W": 1}, drawn_costs(number, drawn.placement)):
        check_runs(plan_transfers(schedule, costs))


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
        check_runs(plan_transfers(drawn.schedule()))
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
    sizes = [((0, 2), "pp must be"), ((2, 0), "num_microbatches must be")]
    check_refusals(lambda *given: custom_schedule(last_first, *given), sizes)
    forwards = custom_schedule(lambda *_: [F1, F0], 2, 2, forward_only=True)
    assert simulate(forwards).length == 3
    with pytest.raises(ParallelPlanError, match="A stage without backwards runs each microbatch"):
        custom_schedule(lambda *_: [F0, F1, B1, B0], 2, 2, forward_only=True)


def test_a_deadlock_names_the_stages_that_wait_for_each_other():
    rows = [[F0, F1, B0, B1], [F0, B0, F1, B1], [F1, B1, F0, B0]]
    with pytest.raises(
        ParallelPlanError,
        match="Stage 1 waits for the input of B of microbatch 0 in chunk 0 from stage 2, stage 2 "
        "waits for the input of F of microbatch 1 in chunk 0 from stage 1. Order the actions so",
    ):
        custom_schedule(lambda rank, *_: rows[rank], 3, 2, name="crossed")


@given(NUMBERS)
def test_any_schedule_is_restored_from_its_csv(number):
    for schedule in (drawn_schedule(number), drawn_rows(number).schedule()):
        restored = parse_schedule(format_schedule(schedule), "mine.csv")
        assert (restored.name, restored.rows) == ("mine.csv", schedule.rows)
        assert restored.forward_only == schedule.forward_only
        assert restored.num_microbatches == schedule.num_microbatches
        ours, theirs = schedule.placement, restored.placement
        assert (theirs.num_stages, theirs.num_chunks) == (ours.num_stages, ours.num_chunks)
        numbers = range(ours.num_virtual_stages)
        assert all(ours.owner(virtual) == theirs.owner(virtual) for virtual in numbers)


def test_cells_are_virtual_stage_kind_and_microbatch():
    text = format_schedule(build_schedule("zb-v", 2, 2, 2))
    assert text == (
        "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n"
        "1F0,2F0,1F1,2F1,2I0,2W0,1I0,2I1,1I1,1W0,2W1,1W1\n"
    )
    spaced = text.replace(",3I0", ", ,, 3I0 ").replace("\n", "\r\n\r\n")
    assert parse_schedule(spaced, "mine").rows == parse_schedule(text, "mine").rows


def test_schedules_of_torch_are_read(tmp_path):
    stages, chunks, path = 4, 2, tmp_path / "theirs.csv"
    fields = {"num_stages": stages * chunks, "group_size": stages, "group_rank": 0}
    fields |= {"is_first": False, "is_last": False, "device": "cpu", "submod": None}
    for name, shape in (
        ("ScheduleInterleaved1F1B", "loop"),
        ("ScheduleInterleavedZeroBubble", "loop"),
        ("ScheduleDualPipeV", "v"),
    ):
        placement = Placement(shape, stages, chunks)
        numbers = [placement.virtual_stage(0, chunk) for chunk in range(chunks)]
        theirs = getattr(torch_schedules, name)(
            [SimpleNamespace(stage_index=number, **fields) for number in numbers],
            4 * stages,
            loss_fn=lambda *_: None,
        )
        theirs._dump_csv(str(path), format="compute_only")
        schedule = read_schedule(path)
        sizes = schedule.shape, schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
        assert sizes == (shape, stages, chunks, 4 * stages)
        check_runs(plan_transfers(schedule))


def test_texts_that_are_no_schedule_are_refused_with_the_reason(tmp_path):
    check_refusals(
        lambda text: parse_schedule(text, "mine.csv"),
        [
            (("",), "mine.csv must have a row for each rank: it has none"),
            (("0F0,0B0\n,,\n",), "at least one action: row 1 of 2 has none"),
            (("0F0,0SEND_F0\n",), "such as 0F3: it is '0SEND_F0'"),
            (("0F0,(0F1;0B0)W\n",), "it is '(0F1;0B0)W'"),
            (("0F0,0F٣\n",), "it is '0F٣'"),
            (("0F0,2F0,0B0,2B0\n1F0,1B0\n",), "Use [1, 3] in a loop, or [1, 2] in a V."),
            (("0F0,0F999999,0B0,0B999999\n",), "it has microbatch 999999, but no microbatch 1."),
            (("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",), "its stages wait for each other"),
        ],
    )
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert len(read_schedule(path).actions(0)) == 2
    for content, phrase in (
        (b"0F0,\xff\n", "is not a text file: invalid start byte"),
        (b'0F0,"0B0\n', "is not valid CSV: unexpected end of data"),
        (b"," * ((1 << 23) + 1), "has more than 8388608 bytes"),
    ):
        path.write_bytes(content)
        check_refusals(read_schedule, [((path,), phrase)], CorruptDataError)


def order_of(folder: Path, name: str, stages: int, microbatches: int, chunks: int = 1):
    """Return the order of a file with the rows of a named schedule."""
    path = folder / "mine.csv"
    path.write_text(format_schedule(build_schedule(name, stages, microbatches, chunks)))
    return order_from_file(str(path), stages, chunks)


def test_a_file_runs_only_its_number_of_microbatches(tmp_path):
    order = order_of(tmp_path, "zb-v", 4, 8, 2)
    assert order.build(8).rows == build_schedule("zb-v", 4, 8, 2).rows
    assert (order.num_microbatches, shape_of_order(order), order_may_split(order)) == (8, "v", True)
    check_refusals(order.build, [((6,), "orders 8 microbatches: a step has 6. A file is valid")])
    # Evaluation has no rows in the file, and may have any number of microbatches.
    evaluation = build_schedule("zb-v", 4, 5, 2, forward_only=True)
    assert order.build(5, forward_only=True).rows == evaluation.rows


def test_a_function_runs_every_number_of_microbatches_that_it_supports():
    order = order_from_function(last_first, 4, 1)
    assert order.build(6) is order.build(6), "the function is called once for each number"
    assert order.build(6).rows[3][-1] == Action("B", 0, 0)
    check_refusals(order.build, [((5,), "and vpp 1 it raised ZeroDivisionError: odd")])
    assert order.build(5, forward_only=True).num_microbatches == 5


def test_files_of_other_sizes_and_without_backwards_are_refused(tmp_path):
    order_of(tmp_path, "interleaved", 4, 8, 2)
    (tmp_path / "forward.csv").write_text("0F0,0F1\n1F0,1F1\n")
    cases = {"mine": "Use pp=4 with vpp=2", "forward": "must have backward passes: all its cells"}
    for name, phrase in cases.items():
        check_refusals(order_from_file, [((str(tmp_path / f"{name}.csv"), 2, 1), phrase)])


def test_ranks_compare_the_rows_of_files_and_not_their_paths(tmp_path):
    (tmp_path / "other").mkdir()
    first = order_of(tmp_path, "1f1b", 2, 4)
    assert repr(order_of(tmp_path / "other", "1f1b", 2, 4)) == repr(first)
    assert repr(order_of(tmp_path / "other", "gpipe", 2, 4)) != repr(first)


def rule_of(order: CustomOrder, size: int | None = None) -> MicrobatchRule:
    return MicrobatchRule(size, order, order.placement.num_stages, order.placement.num_chunks, None)


def test_the_default_number_of_microbatches_follows_from_the_order(tmp_path):
    order = order_of(tmp_path, "zb-h1", 4, 6)
    rule = rule_of(order)
    assert (rule.size_for(12), rule.count_for(12)) == (2, 6)
    rule.check(12)
    assert rule.idle_share(6) == simulate(build_schedule("zb-h1", 4, 6)).bubble
    check_refusals(rule_of(order, 2).check, [((8,), "orders 6 microbatches: a step has 4")])
    rule = rule_of(order_from_function(last_first, 2, 1))
    # Four are the fewest microbatches with which stages are idle for at most a fifth of a step.
    assert (rule.count_for(12), rule.count_for(9)) == (4, 9)
    check_refusals(rule.check, [((9,), "it raised ZeroDivisionError")])
