"""Schedules have Megatron-Core's order and the papers' bubbles and memory, and never deadlock."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import (
    Action,
    Placement,
    Schedule,
    StageCosts,
    TransferBatch,
    build_schedule,
    live_microbatches,
    plan_transfers,
    simulate,
)
from lightning_megatron.plan.actions import PassPair
from lightning_megatron.plan.live_microbatches import check_peak, peak_activations
from lightning_megatron.plan.schedule import SCHEDULE_NAMES
from lightning_megatron.plan.settings import join_or
from lightning_megatron.plan.simulate import consumer_of
from tests.plan.pipelines import (
    NUMBERS,
    check_runs,
    drawn_costs,
    drawn_schedule,
    execute,
    order_of,
    warmup_of,
)
from tests.refusals import check_refusals

STAGES = st.integers(1, 16)
TIMES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


def test_orders_match_worked_examples():
    assert build_schedule("interleaved", 2, 4, 2) == build_schedule("interleaved", 2, 4, 2, 2)
    evaluation = build_schedule("interleaved", 2, 4, 2, forward_only=True)
    assert order_of(evaluation, 1) == [1, 1, 2, 2, 1, 1, 2, 2]
    rows = build_schedule("zb-h1", 3, 4).rows
    assert [" ".join(f"{a.kind}{a.microbatch + 1}" for a in row) for row in rows] == [
        "F1 F2 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4",
        "F1 F2 I1 F3 I2 W1 F4 I3 W2 I4 W3 W4",
        "F1 I1 F2 I2 F3 I3 W1 F4 I4 W2 W3 W4",
    ], "the figure of its paper"


@given(NUMBERS)
def test_every_schedule_is_complete_and_never_deadlocks_at_any_speed(number):
    schedule = drawn_schedule(number).validate()
    costs = drawn_costs(number, schedule.placement)
    check_runs(schedule)
    rows = simulate(schedule, costs).rows
    spans = {(stage, s.action): s for stage, row in enumerate(rows) for s in row}
    for (stage, action), span in spans.items():
        target = consumer_of(schedule, stage, action)
        if target is not None:
            delay = costs.transfer if target[0] != stage else 0
            assert spans[target].start >= span.stop + delay
    # A microbatch has one transfer for each border between stages, and one back.
    owners = [schedule.placement.owner(v)[0] for v in range(schedule.placement.num_virtual_stages)]
    borders = sum(before != after for before, after in pairwise(owners))
    steps = [step for row in plan_transfers(schedule) for step in row]
    steps = [step for step in steps if isinstance(step, TransferBatch)]
    directions = 1 if schedule.forward_only else 2
    sent = sum(len(step.sends) for step in steps)
    assert sent == borders * schedule.num_microbatches * directions


@given(NUMBERS)
def test_each_chunk_takes_microbatches_in_order_within_its_slots(number):
    schedule = drawn_schedule(number)
    for rank in range(schedule.num_stages):
        row = schedule.actions(rank)
        for chunk in range(schedule.num_chunks):
            for kinds in ("F", "BI", "BW"):
                taken = [a.microbatch for a in row if a.chunk == chunk and a.kind in kinds]
                backward = kinds != "F" and schedule.forward_only
                assert taken == ([] if backward else list(range(schedule.num_microbatches)))
        live = live_microbatches(schedule, rank)
        assert max(live.slots) <= live.total <= sum(live.slots)
        assert all(due <= slots for due, slots in zip(live.waiting, live.slots, strict=True))
        order, warmup = order_of(schedule, rank), warmup_of(schedule, rank)
        assert all(chunk > 0 for chunk in order[:warmup])
        assert all(chunk < 0 for chunk in order[warmup : warmup + 1])


def test_the_executor_stops_at_a_deadlock():
    schedule = build_schedule("1f1b", 2, 2)
    rows = plan_transfers(schedule)
    crossed = [[step for step in row if isinstance(step, TransferBatch)] for row in rows]
    crossed[1][0], crossed[1][1] = crossed[1][1], crossed[1][0]
    ranks = execute(schedule, crossed)
    assert any(rank.next < len(rank.instructions) for rank in ranks)


def test_a_result_is_sent_before_the_next_action():
    for schedule in (build_schedule("1f1b", 4, 8), build_schedule("interleaved", 4, 8, 2)):
        for rank in range(4):
            last = None
            for step in plan_transfers(schedule)[rank]:
                if isinstance(step, Action):
                    last = step
                else:
                    assert all(
                        (s.kind, s.chunk, s.microbatch) == (last.kind, last.chunk, last.microbatch)
                        for s in step.sends
                    )
    halves = (Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0))
    steps = plan_transfers(Schedule("split", 2, 1, 1, (halves, halves)).validate())[1]
    kinds = [step.kind if isinstance(step, Action) else "transfer" for step in steps]
    assert kinds == ["transfer", "F", "I", "transfer", "W"], "W does not delay the gradient"


def test_pairs_switch_between_microbatches_of_two_streams():
    alone = build_schedule("1f1b", 1, 4, is_paired=True)
    assert peaks(alone) == [2], "the next forward begins before each backward"
    both = (alone, *(build_schedule("dualpipe-v", pp, 4 * pp, 2, is_paired=True) for pp in (2, 8)))
    for schedule in both:
        for rank, row in enumerate(plan_transfers(schedule)):
            pairs = [step for step in row if isinstance(step, PassPair)]
            number = 2 * schedule.num_microbatches - 3 * schedule.num_stages + rank + 1
            assert len(pairs) == (3 if schedule is alone else number)
            for pair in pairs:
                first, second = pair.actions
                if schedule is alone:
                    assert first.microbatch == second.microbatch + 1
                else:
                    assert {first.chunk, second.chunk} == {0, 1}
    plain = build_schedule("dualpipe-v", 2, 8, 2)
    assert not any(isinstance(step, PassPair) for row in plan_transfers(plain) for step in row)
    row = (Action("F", 0, 0), Action("B", 0, 0))
    single = Schedule("mine", 1, 1, 1, (row,), is_paired=True)
    assert single.pair_at(0, 0) is None, "a backward needs the forward of its own microbatch"


def peaks(schedule: Schedule) -> list[int]:
    return [live_microbatches(schedule, rank).total for rank in range(schedule.num_stages)]


def costs_of(schedule: Schedule, times: tuple[int, int, int]) -> StageCosts:
    return StageCosts(*((time,) * schedule.placement.num_virtual_stages for time in times))


def test_1f1b_gpipe_and_interleaved_keep_the_stated_numbers_of_microbatches():
    assert peaks(build_schedule("1f1b", 4, 3)) == [3, 3, 2, 1]
    assert peaks(build_schedule("gpipe", 4, 8)) == [8] * 4
    assert simulate(build_schedule("gpipe", 4, 8)).length == (8 + 4 - 1) * 3
    assert peaks(build_schedule("interleaved", 4, 8, 2)) == [11, 9, 7, 5]


@given(STAGES, st.integers(0, 30), TIMES, st.booleans())
def test_zero_bubble_waits_for_the_stated_time_where_weight_halves_are_shortest(
    stages, more, times, swap
):
    weight, half, forward = sorted(times)
    forward, half = (half, forward) if swap else (forward, half)
    schedule = build_schedule("zb-h1", stages, 2 * stages - 1 + more)
    waits = simulate(schedule, costs_of(schedule, (forward, half, weight))).waits()
    assert max(waits) == (stages - 1) * (forward + half - weight)
    assert peaks(schedule) == [stages] * stages
    warmups = [stages - rank for rank in range(stages)]
    assert [warmup_of(schedule, rank) for rank in range(stages)] == warmups


@given(st.integers(1, 8), st.integers(0, 30), st.integers(1, 9))
def test_schedules_in_a_v_have_the_stated_memory_and_bubble(stages, more, time):
    microbatches = 2 * stages + more
    schedule = build_schedule("zb-v", stages, microbatches, 2)
    timeline = simulate(schedule, costs_of(schedule, (time,) * 3))
    assert timeline.waits() == (0,) * stages, "no bubble at equal times"
    assert timeline.length == (6 * microbatches + stages - 1) * time
    assert peaks(schedule) == [2 * stages] * stages
    assert warmup_of(schedule, 0) == 2 * stages
    few = min(more + 1, 2 * stages)
    schedule = build_schedule("zb-v", stages, few, 2)
    assert simulate(schedule).length <= 4 * stages + 1 + 6 * few
    assert max(peaks(schedule)) <= 2 * min(stages, few)
    schedule = build_schedule("dualpipe-v", stages, microbatches, 2)
    assert peaks(schedule) == [2 * stages + 1] * stages, "half a microbatch more"


def test_a_placement_gives_every_virtual_stage_one_owner():
    for shape, stages, chunks in product(("loop", "v"), (1, 2, 5), (1, 2, 4)):
        placement = Placement(shape, stages, chunks)
        numbers = list(range(placement.num_virtual_stages))
        owners = [placement.owner(number) for number in numbers]
        assert len(set(owners)) == stages * chunks
        assert [placement.virtual_stage(*owner) for owner in owners] == numbers
        steps = [after - before for (before, _), (after, _) in pairwise(owners)]
        if shape == "v":
            assert all(abs(step) <= 1 for step in steps)
        else:
            assert all(step % stages in (0, 1) for step in steps)
    check_refusals(Placement, [(("w", 2, 2), "shape must be loop or v: it is 'w'")])


def test_microbatches_that_wait_for_weight_halves_keep_fewer_activations():
    schedule = build_schedule("zb-h1", 4, 8)
    assert live_microbatches(schedule, 3).waiting == (4,)
    assert live_microbatches(schedule, 0).waiting == (1,)
    # The last stage has one microbatch between forward and backward, and three with deferred W.
    assert peak_activations(schedule, 3, [34.0]) == pytest.approx(34 + 3 * 32)
    assert peak_activations(schedule, 0, [34.0]) == pytest.approx(4 * 34)
    check_peak(schedule, 136.0, [[34.0]] * 4)
    with pytest.raises(ParallelPlanError, match="keeps 136 on stage 0, the limit is 135"):
        check_peak(schedule, 135.0, [[34.0]] * 4)


def test_transfers_within_a_stage_take_no_time():
    schedule = build_schedule("zb-v", 1, 4, 2)
    assert simulate(schedule, StageCosts((1, 1), (1, 1), (1, 1), transfer=5)).length == 4 * 2 * 3
    # Down the V and up again there are two boundaries between stages, forward and backward.
    schedule = build_schedule("zb-v", 2, 1, 2)
    slow = simulate(schedule, StageCosts((1,) * 4, (1,) * 4, (1,) * 4, transfer=5))
    assert slow.length == simulate(schedule).length + 4 * 5


def test_schedules_that_cannot_run_are_refused_with_the_rule_and_a_remedy():
    check_refusals(
        build_schedule,
        [
            (("zb", 2, 2), f"schedule must be {join_or(SCHEDULE_NAMES)}: it is 'zb'."),
            (("1f1b", 2, 0), "num_microbatches must be a whole number of at least 1: it is 0"),
            (("gpipe", 4, 8, 2), "or vpp of 1."),
            (("interleaved", 4, 8, 1), "needs vpp above 1: vpp is 1"),
            (("interleaved", 4, 3, 2), "Use 4 microbatches or more, or schedule '1f1b'"),
            (("interleaved", 4, 9, 2), "Use microbatch_group_size of 5 or 9, or 12 microbatches."),
            (("interleaved", 4, 9, 2, 3), "a smaller group would wait for its own output"),
            (("zb-v", 4, 8), "runs two chunks per stage: vpp is 1."),
            (("dualpipe-v", 4, 7, 2), "Use 8 microbatches or more, or schedule 'zb-v'."),
            (("1f1b", 1, 1, 1, None, False, True), "needs at least two microbatches in a step"),
            (("1f1b", 2, 4, 1, None, False, True), "schedule is '1f1b' with pp 2."),
            (("zb-v", 4, 8, 2, 4), "microbatch_group_size (4) belongs to schedule 'interleaved'"),
        ],
    )
    check_refusals(
        StageCosts,
        [
            (((1, 1), (1,), (1, 1)), "{'forward': 2, 'input_half': 1, "),
            (
                ((1, 1), (1, 0), (1, 1)),
                "input_half[1] must be a whole number of at least 1: it is 0",
            ),
            (((1,), (1,), (1,), -1), "transfer must be a whole number of at least 0: it is -1"),
        ],
    )
    costs = StageCosts((1, 1), (1, 1), (1, 1))
    check_refusals(simulate, [((build_schedule("zb-v", 2, 4, 2), costs), "Use 4 times")])
    check_refusals(costs.merged, [((3,), "Use 3 times in each list, or a multiple of 3.")])
