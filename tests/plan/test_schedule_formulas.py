"""Formulas for step time, bubble and memory hold at all sizes for which the papers state them."""

from __future__ import annotations

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from lightning_megatron.plan import build_schedule, live_microbatches, simulate

MANY = settings(max_examples=60, deadline=None, database=None)
STAGES = st.integers(1, 16)
TIMES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


def costs_of(times: tuple[int, int, int]) -> dict[str, int]:
    forward, half, weight = times
    return {"F": forward, "I": half, "W": weight, "B": half + weight}


@seed(17)
@MANY
@given(STAGES, st.integers(1, 64), TIMES)
def test_1f1b_and_gpipe_take_the_textbook_time_and_differ_in_memory(
    stages: int, microbatches: int, times: tuple[int, int, int]
) -> None:
    for name in ("1f1b", "gpipe"):
        schedule = build_schedule(name, stages, microbatches)
        timeline = simulate(schedule, costs_of(times))
        assert timeline.length == (microbatches + stages - 1) * sum(times)
        assert timeline.idle() == ((stages - 1) * sum(times),) * stages
        peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
        peaks_by_name = {"1f1b": [min(stages - rank, microbatches) for rank in range(stages)]}
        assert peaks == peaks_by_name.get(name, [microbatches] * stages)


@seed(17)
@MANY
@given(st.integers(2, 16), st.integers(2, 4), st.data(), TIMES)
def test_interleaved_divides_the_bubble_by_the_chunks(
    stages: int, chunks: int, data: st.DataObject, times: tuple[int, int, int]
) -> None:
    microbatches = stages * data.draw(st.integers(1, 64 // stages))
    schedule = build_schedule("interleaved", stages, microbatches, chunks)
    timeline = simulate(schedule, costs_of(times))
    # The unit is the time of a chunk: the time of a stage divided by the number of chunks.
    assert timeline.length == (microbatches * chunks + stages - 1) * sum(times)
    peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
    assert peaks == [
        min(2 * (stages - 1 - rank) + (chunks - 1) * stages + 1, microbatches * chunks)
        for rank in range(stages)
    ]


@seed(17)
@MANY
@given(STAGES, st.sampled_from([1, 2]), st.data(), TIMES)
def test_zero_bubble_waits_for_the_stated_time_where_weight_halves_are_shortest(
    stages: int, lead: int, data: st.DataObject, times: tuple[int, int, int]
) -> None:
    weight, *longer = sorted(times)
    forward, half = data.draw(st.permutations(longer))
    full = lead * (stages - 1) + 1
    microbatches = data.draw(st.integers(full + stages - 1, 64))
    schedule = build_schedule(f"zb-h{lead}", stages, microbatches)
    timeline = simulate(schedule, costs_of((forward, half, weight)))
    assert max(timeline.waits()) == (stages - 1) * (forward + half - lead * weight)
    peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
    assert peaks == [full] * stages


@seed(17)
@MANY
@given(STAGES, st.data(), st.integers(1, 9))
def test_zb_v_never_waits_at_equal_times_with_the_memory_of_1f1b(
    stages: int, data: st.DataObject, time: int
) -> None:
    microbatches = data.draw(st.integers(2 * stages, 64))
    schedule = build_schedule("zb-v", stages, microbatches, 2)
    timeline = simulate(schedule, costs_of((time, time, time)))
    assert timeline.waits() == (0,) * stages
    assert timeline.length == (6 * microbatches + stages - 1) * time
    peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
    assert peaks == [2 * stages] * stages


@seed(17)
@MANY
@given(STAGES, st.data())
def test_dualpipe_v_keeps_half_a_microbatch_more_than_zb_v(
    stages: int, data: st.DataObject
) -> None:
    microbatches = data.draw(st.integers(2 * stages, 64))
    schedule = build_schedule("dualpipe-v", stages, microbatches, 2)
    peaks = [live_microbatches(schedule, rank).total for rank in range(stages)]
    assert peaks == [2 * stages + 1] * stages
