"""No slot of CUDA graphs is booked twice, and gradients are reduced once, in one order."""

from __future__ import annotations

from hypothesis import given

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan import (
    Action,
    GraphSlots,
    PipelineUnit,
    Schedule,
    build_schedule,
    custom_schedule,
    simulate,
)
from lightning_megatron.plan.schedule import NAMED_SCHEDULES
from lightning_megatron.plan.simulate import reduction_points
from tests.plan.pipelines import NUMBERS, drawn_schedule
from tests.refusals import check_refusals

NAMES = [name for name, named in NAMED_SCHEDULES.items() if not named.keeps_all]


def slots_of(schedule: Schedule) -> list[GraphSlots]:
    return [GraphSlots(schedule, rank) for rank in range(schedule.num_stages)]


def first_slots(slots: GraphSlots) -> tuple[int, ...]:
    return tuple(0 if unit is None else slots.slot_of(unit) for unit in slots.first_units)


def check_bookings(schedule: Schedule) -> None:
    """Check that no unit of a stage finds its slot taken, and that each peak is reached."""
    for slots in slots_of(schedule):
        taken: dict[tuple[int, int], PipelineUnit] = {}
        reached = [0] * schedule.num_chunks
        for action in schedule.actions(slots.rank):
            slot = action.chunk, slots.slot_of(action.unit)
            if action.kind == "F":
                assert slot not in taken, f"{action} takes the slot of {taken.get(slot)}"
                taken[slot] = action.unit
                reached[action.chunk] = max(reached[action.chunk], slot[1] + 1)
            else:
                assert taken[slot] == action.unit, f"{action} runs in the slot of another unit"
                if action.kind in ("B", "W"):
                    del taken[slot]
        assert not taken
        assert tuple(reached) == slots.peaks


@given(NUMBERS)
def test_microbatches_take_the_slots_in_turn_and_none_is_booked_twice(number):
    schedule = drawn_schedule(number, *NAMES)
    try:
        booked = slots_of(schedule)
    except UnsupportedError:
        return  # it keeps all microbatches at once
    if schedule.forward_only:
        assert all(slots.peaks == (1,) * schedule.num_chunks for slots in booked)
        return
    check_bookings(schedule)
    for slots in booked:
        assert first_slots(slots) == (0,) * schedule.num_chunks, "the first backwards"
        for chunk, peak in enumerate(slots.peaks):
            numbers = range(schedule.num_microbatches)
            taken = [slots.slot_of(PipelineUnit(chunk, n)) for n in numbers]
            assert taken == [n % peak for n in numbers]


def test_numbers_of_slots_match_the_papers():
    for number in (8, 64):
        slots = slots_of(build_schedule("interleaved", 4, number, 2))
        assert [stage_slots.peaks for stage_slots in slots] == [(8, 4), (8, 4), (7, 3), (5, 1)]
        plain = slots_of(build_schedule("1f1b", 4, number))
        assert [stage_slots.peaks for stage_slots in plain] == [(4,), (3,), (2,), (1,)]


def last_first(rank: int, stages: int, number: int, chunks: int) -> list[Action]:
    """Repeat two forwards and then their backwards in reverse order."""
    row = []
    for start in range(0, number, 2):
        pair = range(start, min(start + 2, number))
        row += [Action("F", 0, n) for n in pair] + [Action("B", 0, n) for n in reversed(pair)]
    return row


def test_a_custom_schedule_books_the_slot_that_is_free_longest():
    (slots,) = slots_of(custom_schedule(last_first, 1, 5))
    assert [slots.slot_of(PipelineUnit(0, n)) for n in range(5)] == [0, 1, 1, 0, 0]
    assert first_slots(slots) == (1,)
    check_bookings(slots.schedule)


def test_schedules_that_keep_all_microbatches_are_refused():
    def all_forwards(rank: int, stages: int, number: int, chunks: int) -> list[Action]:
        return [Action(kind, 0, n) for kind in ("F", "B") for n in range(number)]

    check_refusals(
        GraphSlots,
        [
            ((build_schedule("gpipe", 2, 8), 1), "keeps all 8 of the step at once on stage 0"),
            ((custom_schedule(all_forwards, 2, 5), 0), "keeps all 5 of"),
        ],
    )
    assert GraphSlots(custom_schedule(all_forwards, 2, 4), 1).peaks == (4,)


@given(NUMBERS)
def test_every_chunk_is_reduced_once_after_the_slowest_stage_in_one_order(number):
    schedule = drawn_schedule(number, *NAMES)
    if schedule.forward_only:
        return
    points = reduction_points(schedule)
    rows = simulate(schedule).rows
    assert len(points) == schedule.num_stages
    assert len({tuple(point.chunk for point in row) for row in points}) == 1
    done = {
        chunk: max(
            s.stop for row in rows for s in row if s.action.kind in "BW" and s.action.chunk == chunk
        )
        for chunk in range(schedule.num_chunks)
    }
    for row, spans in zip(points, rows, strict=True):
        assert sorted(point.chunk for point in row) == list(done)
        assert [point.after_action for point in row] == sorted(point.after_action for point in row)
        for point in row:
            own = [
                index
                for index, span in enumerate(spans)
                if span.action.kind in "BW" and span.action.chunk == point.chunk
            ]
            assert own[-1] <= point.after_action < len(spans)
            assert point.early == (point.after_action == own[-1])
            is_end = point.after_action == len(spans) - 1
            assert spans[point.after_action].stop >= done[point.chunk] or is_end
            if point.after_action > own[-1]:
                assert spans[point.after_action - 1].stop < done[point.chunk], (
                    "no later than needed"
                )


def test_reduction_points_of_worked_examples():
    first, second = reduction_points(build_schedule("interleaved", 2, 4, 2))
    assert [(point.chunk, point.early) for point in first] == [(1, True), (0, True)]
    assert [(point.chunk, point.early) for point in second] == [(1, False), (0, True)]
    evaluation = build_schedule("1f1b", 2, 2, forward_only=True)
    check_refusals(reduction_points, [((evaluation,), "must have backward passes")])
