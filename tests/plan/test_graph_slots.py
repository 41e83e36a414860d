"""No slot of CUDA graphs is booked twice, and more microbatches need no more slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan import (
    Action,
    GraphSlots,
    PipelineUnit,
    Schedule,
    build_schedule,
    custom_schedule,
)

MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}


def slots_of(schedule: Schedule) -> list[GraphSlots]:
    return [GraphSlots(schedule, rank) for rank in range(schedule.num_stages)]


def first_slots(slots: GraphSlots) -> tuple[int, ...]:
    return tuple(0 if unit is None else slots.slot_of(unit) for unit in slots.first_units)


def fewest_microbatches(name: str, stages: int) -> int:
    return {"interleaved": stages, "dualpipe-v": 2 * stages}.get(name, 1)


def named_schedules() -> Iterator[Schedule]:
    """Yield every named schedule but gpipe with pp <= 8, vpp <= 4, groups of pp microbatches and
    several numbers of groups.
    """
    for name in (*CHUNKS, "interleaved"):
        for stages in range(1 + (name == "interleaved"), 9):
            for chunks in range(2, 5) if name == "interleaved" else [CHUNKS[name]]:
                for groups in {2, 3, 5, 64 // stages}:
                    yield build_schedule(name, stages, groups * stages, chunks)


@st.composite
def drawn_schedules(draw: st.DrawFn) -> Schedule:
    """Draw any named schedule but gpipe, with groups far smaller than all microbatches."""
    name = draw(st.sampled_from([*CHUNKS, "interleaved"]))
    stages = draw(st.integers(1 + (name == "interleaved"), 8))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else CHUNKS[name]
    microbatches = draw(st.integers(fewest_microbatches(name, stages), 64))
    group = None
    if name == "interleaved":
        sizes = [
            size
            for size in range(stages, microbatches + 1)
            if not 0 < microbatches % size < stages
            and (4 * size <= microbatches or microbatches <= 2 * stages)
        ]
        group = draw(st.sampled_from(sizes)) if sizes else None
        microbatches = microbatches if sizes else stages
    return build_schedule(name, stages, microbatches, chunks, group)


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
        assert tuple(map(slots.peak, range(schedule.num_chunks))) == slots.peaks


@MANY
@given(drawn_schedules())
def test_no_slot_is_booked_twice(schedule: Schedule) -> None:
    check_bookings(schedule)


@MANY
@given(drawn_schedules())
def test_the_first_backward_of_every_chunk_is_in_slot_0(schedule: Schedule) -> None:
    for slots in slots_of(schedule):
        assert first_slots(slots) == (0,) * schedule.num_chunks


def test_the_number_of_slots_does_not_depend_on_the_number_of_microbatches() -> None:
    peaks: dict[tuple[str, int, int], list[tuple[int, ...]]] = {}
    for schedule in named_schedules():
        of_stages = sum((slots.peaks for slots in slots_of(schedule)), ())
        key = schedule.name, schedule.num_stages, schedule.num_chunks
        peaks.setdefault(key, []).append(of_stages)
    assert len(peaks) == 5 * 8 + 3 * 7
    for (name, stages, chunks), peaks_of_schedules in peaks.items():
        assert len(peaks_of_schedules) >= 3, (name, stages, chunks)
        assert len(set(peaks_of_schedules)) == 1, (name, stages, chunks)
        assert max(peaks_of_schedules[0]) <= 2 * stages


@MANY
@given(drawn_schedules())
def test_microbatches_take_the_slots_in_turn(schedule: Schedule) -> None:
    for slots in slots_of(schedule):
        for chunk, peak in enumerate(slots.peaks):
            numbers = range(schedule.num_microbatches)
            assert [slots.slot_of(PipelineUnit(chunk, n)) for n in numbers] == [
                n % peak for n in numbers
            ]


def test_numbers_of_slots_match_the_papers() -> None:
    for number in (8, 16, 64):
        slots = slots_of(build_schedule("interleaved", 4, number, 2))
        assert [stage_slots.peaks for stage_slots in slots] == [(8, 4), (8, 4), (7, 3), (5, 1)]
        assert [sum(stage_slots.peaks) for stage_slots in slots] == [12, 12, 10, 6]
        plain = slots_of(build_schedule("1f1b", 4, number))
        assert [stage_slots.peaks for stage_slots in plain] == [(4,), (3,), (2,), (1,)]


def test_an_evaluation_has_one_slot() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 3), ("zb-v", 2), ("gpipe", 1)):
        schedule = build_schedule(name, 2, 5, chunks, forward_only=True)
        for slots in slots_of(schedule):
            assert slots.peaks == (1,) * chunks
            assert {slots.slot_of(a.unit) for a in schedule.actions(slots.rank)} == {0}
            assert first_slots(slots) == (0,) * chunks


def last_first(rank: int, stages: int, number: int, chunks: int) -> list[Action]:
    """Repeat two forwards and then their backwards in reverse order."""
    row = []
    for start in range(0, number, 2):
        pair = range(start, min(start + 2, number))
        row += [Action("F", 0, n) for n in pair] + [Action("B", 0, n) for n in reversed(pair)]
    return row


def test_a_custom_schedule_books_the_slot_that_is_free_longest() -> None:
    (slots,) = slots_of(custom_schedule(last_first, 1, 5))
    assert [slots.slot_of(PipelineUnit(0, n)) for n in range(5)] == [0, 1, 1, 0, 0]
    assert first_slots(slots) == (1,)
    check_bookings(slots.schedule)


def all_forwards(rank: int, stages: int, number: int, chunks: int) -> list[Action]:
    return [Action(kind, 0, n) for kind in ("F", "B") for n in range(number)]


@pytest.mark.parametrize("number", [1, 2, 8])
def test_gpipe_is_refused(number: int) -> None:
    with pytest.raises(UnsupportedError) as error:
        GraphSlots(build_schedule("gpipe", 2, number), 1)
    assert str(error.value) == (
        "CUDA graphs need a schedule whose stages keep a limited number of microbatches: schedule "
        f"'gpipe' keeps all {number} of the step at once on stage 0, and each of them needs its "
        "own graphs and memory. Use schedule '1f1b', or 'interleaved' with groups of pp "
        "microbatches."
    )


def test_custom_schedules_and_groups_that_keep_all_microbatches_are_refused() -> None:
    for schedule in (
        custom_schedule(all_forwards, 2, 5),
        build_schedule("interleaved", 2, 6, 2, microbatch_group_size=6),
    ):
        with pytest.raises(UnsupportedError, match=f"keeps all {schedule.num_microbatches} of"):
            GraphSlots(schedule, 0)
    assert GraphSlots(custom_schedule(all_forwards, 2, 4), 1).peaks == (4,)


def test_stages_chunks_and_units_that_do_not_exist_are_refused() -> None:
    schedule = build_schedule("1f1b", 2, 3)
    with pytest.raises(ParallelPlanError, match="rank must be a position on its axis: it is 2"):
        GraphSlots(schedule, 2)
    slots = GraphSlots(schedule, 0)
    with pytest.raises(ParallelPlanError, match="chunk must be a position on its axis: it is 1"):
        slots.peak(1)
    with pytest.raises(ParallelPlanError, match="microbatch 3 in chunk 0 does not exist. Use"):
        slots.slot_of(PipelineUnit(0, 3))
