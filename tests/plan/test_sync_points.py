"""Gradients are reduced once, in one order, after the slowest stage has completed them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan import Action, Schedule, build_schedule, simulate
from lightning_megatron.plan.sync_points import ReductionPoint, reduction_points


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]))
    if name == "interleaved":
        stages = draw(st.integers(2, 5))
        return build_schedule(
            name, stages, stages * draw(st.integers(1, 3)), draw(st.integers(2, 4))
        )
    chunks = 2 if name == "zb-v" else 1
    return build_schedule(name, draw(st.integers(1, 6)), draw(st.integers(1, 10)), chunks)


@given(schedules())
def test_every_chunk_is_reduced_once_after_its_last_backward_in_one_order(
    schedule: Schedule,
) -> None:
    points = reduction_points(schedule)
    assert len(points) == schedule.num_stages
    assert len({tuple(point.chunk for point in row) for row in points}) == 1
    for rank, row in enumerate(points):
        assert sorted(point.chunk for point in row) == list(range(schedule.num_chunks))
        assert [point.after_action for point in row] == sorted(point.after_action for point in row)
        actions = schedule.actions(rank)
        for point in row:
            last = max(
                i
                for i, action in enumerate(actions)
                if action.kind in "BW" and action.chunk == point.chunk
            )
            assert last <= point.after_action < len(actions)
            assert point.early == (point.after_action == last)


@given(schedules())
def test_no_stage_reduces_before_the_slowest_stage_is_done_unless_it_is_at_its_end(
    schedule: Schedule,
) -> None:
    rows = simulate(schedule).rows
    for chunk in range(schedule.num_chunks):
        done = max(
            s.stop for row in rows for s in row if s.action.kind in "BW" and s.action.chunk == chunk
        )
        for rank, row in enumerate(reduction_points(schedule)):
            (point,) = (point for point in row if point.chunk == chunk)
            span = rows[rank][point.after_action]
            assert span.stop >= done or point.after_action == len(rows[rank]) - 1
            if point.after_action:
                assert rows[rank][point.after_action - 1].stop < done


def test_a_single_stage_reduces_during_its_last_backward() -> None:
    assert reduction_points(build_schedule("1f1b", 1, 4)) == ((ReductionPoint(7, 0, True),),)


def test_stages_with_one_chunk_reduce_at_the_end() -> None:
    points = reduction_points(build_schedule("1f1b", 4, 8))
    assert points == ((ReductionPoint(15, 0, True),),) * 4


def test_the_later_chunk_is_reduced_during_the_backwards_of_the_earlier_chunk() -> None:
    schedule = build_schedule("interleaved", 2, 4, 2)
    points = reduction_points(schedule)
    assert [[point.chunk for point in row] for row in points] == [[1, 0], [1, 0]]
    first, second = points
    assert [point.early for point in first] == [True, True]
    assert [point.early for point in second] == [False, True]
    assert schedule.actions(1)[second[0].after_action].chunk == 0


def test_gradients_are_reduced_after_the_last_weight_half() -> None:
    row = (Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0))
    assert reduction_points(Schedule("halves", 1, 1, 1, (row,)).validate()) == (
        (ReductionPoint(2, 0, True),),
    )


def test_a_schedule_without_backwards_is_refused() -> None:
    with pytest.raises(ParallelPlanError, match="must have backward passes"):
        reduction_points(build_schedule("1f1b", 2, 2, forward_only=True))
