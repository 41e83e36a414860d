"""Sizes of global batches follow the number of samples consumed, as a loop over batches does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.global_batch import GlobalBatch, RampUp


def size_at(batch: GlobalBatch, consumed: int) -> int:
    """Return the size by Megatron-LM's rule, in exact integers."""
    ramp = batch.ramp_up
    if ramp is None or consumed > ramp.samples:
        return batch.size
    increments = (batch.size - ramp.start) // ramp.increment
    return ramp.start + consumed * increments // ramp.samples * ramp.increment


@st.composite
def batches(draw: st.DrawFn) -> GlobalBatch:
    start = draw(st.integers(1, 9))
    increment = draw(st.integers(1, 9))
    number = draw(st.integers(1, 9))
    ramp = RampUp(start, increment, draw(st.integers(1, 200)))
    return GlobalBatch(start + number * increment, draw(st.sampled_from([None, ramp])))


@settings(max_examples=300, deadline=None)
@given(batch=batches(), start=st.integers(0, 250), length=st.integers(0, 250))
def test_sizes_counts_and_positions_equal_a_loop_over_batches(
    batch: GlobalBatch, start: int, length: int
) -> None:
    position = start
    number = 0
    while position + size_at(batch, position) <= start + length:
        assert batch.at(position) == size_at(batch, position)
        assert batch.after(start, number) == position
        position += size_at(batch, position)
        number += 1
    assert batch.count(start, start + length) == number
    assert batch.after(start, number) == position


def test_sizes_lists_every_size_of_the_ramp_up() -> None:
    assert GlobalBatch(12, RampUp(4, 2, 100)).sizes == (4, 6, 8, 10, 12)
    assert GlobalBatch(12).sizes == (12,)


def test_a_size_that_does_not_divide_is_refused_with_legal_sizes() -> None:
    GlobalBatch(12).check(3, 2)
    with pytest.raises(ParallelPlanError, match=r"12 is not one of 4 x 2 = 8.*Use 8 or 16, or a"):
        GlobalBatch(12).check(4, 2)
    with pytest.raises(ParallelPlanError, match=r"number of data ranks of 1, 2, 3, 6\."):
        GlobalBatch(12).check(4, 2)
    with pytest.raises(ParallelPlanError, match=r"each size of ramp_up .*: 6 is not one of 4 x 1"):
        GlobalBatch(12, RampUp(4, 2, 100)).check(4)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (RampUp(3, 4, 10), "start may be 2, 6"),
        (RampUp(12, 4, 10), "start may be 6"),
        (RampUp(10, 4, 10), "start may be 6"),
        (RampUp(1, 20, 10), "Use an increment below 10"),
    ],
)
def test_a_ramp_up_that_misses_the_final_size_is_refused(ramp: RampUp, message: str) -> None:
    with pytest.raises(ParallelPlanError, match=message):
        GlobalBatch(10, ramp)


def test_arguments_that_contradict_each_other_are_refused() -> None:
    assert GlobalBatch.of(None, None, 3) is None
    with pytest.raises(ParallelPlanError, match="ramp_up needs global_batch_size"):
        GlobalBatch.of(None, RampUp(1, 1, 1), None)
    with pytest.raises(ParallelPlanError, match=r"batch_size \(3\) and global_batch_size \(8\)"):
        GlobalBatch.of(8, None, 3)
    with pytest.raises(UnsupportedError, match="accumulate_grad_batches above 1"):
        GlobalBatch(8).check_accumulation(True)
    with pytest.raises(ParallelPlanError, match=r"ramp_up\.start must be"):
        RampUp(0, 1, 1)
