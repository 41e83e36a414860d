"""Batches are split as the user asks or so that stages stay busy; their sizes may ramp up."""

from __future__ import annotations

import random
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.plan.experts import grown_factor, limited_rows, smallest_factor
from lightning_megatron.plan.global_batch import GlobalBatch, RampUp
from lightning_megatron.plan.microbatches import MicrobatchRule
from tests.refusals import check_refusals


def rule(
    size: object = None, pp: int = 1, vpp: int = 1, group: int | None = None
) -> MicrobatchRule:
    return MicrobatchRule(size, "interleaved" if vpp > 1 else "1f1b", pp, vpp, group)


def test_without_stages_or_by_request_a_batch_is_one_microbatch():
    for single in (rule(), rule("batch"), rule("batch", pp=4)):
        assert single.is_whole
        assert (single.size_for(7), single.count_for(7)) == (7, 1)
    assert (rule(3).size_for(8), rule(3).count_for(8)) == (3, 3)


def test_stages_are_idle_for_at_most_a_fifth_of_a_step_with_the_fewest_microbatches():
    for pp, vpp, num_samples, count in ((2, 1, 6, 6), (4, 1, 64, 16), (4, 2, 60, 12), (4, 1, 1, 1)):
        assert rule(pp=pp, vpp=vpp).count_for(num_samples) == count
    for pp, vpp in ((2, 1), (4, 1), (2, 2), (4, 3)):
        for num_samples in range(1, 100):
            automatic = rule(pp=pp, vpp=vpp)
            count = automatic.count_for(num_samples)
            assert automatic.size_for(num_samples) * count == num_samples
            assert count == num_samples or automatic.idle_share(count) <= 0.2
            fewer = [n for n in range(1, count) if num_samples % n == 0 and automatic.can_run(n)]
            assert all(automatic.idle_share(n) > 0.2 for n in fewer)
            if automatic.can_run(num_samples):
                automatic.check(num_samples)


def test_schedules_set_the_number_of_microbatches():
    for name, vpp, count in (("zb-h1", 1, 4), ("zb-v", 2, 4), ("dualpipe-v", 2, 8)):
        automatic = MicrobatchRule(None, name, 4, vpp, None)
        assert automatic.count_for(48) == count < rule(pp=4).count_for(48) == 12
        assert automatic.idle_share(count) <= 0.2
    assert rule(pp=4, vpp=2, group=6).count_for(60) == 6
    check_refusals(
        rule(pp=4, vpp=2).check, [((3,), "needs at least as many microbatches as stages")]
    )


def size_at(batch: GlobalBatch, consumed: int) -> int:
    """Return the size by Megatron-LM's rule, in exact integers."""
    ramp = batch.ramp_up
    if ramp is None or consumed > ramp.samples:
        return batch.size
    increments = (batch.size - ramp.start) // ramp.increment
    return ramp.start + consumed * increments // ramp.samples * ramp.increment


@given(st.integers(0, 2**32))
def test_sizes_counts_and_positions_of_global_batches_equal_a_loop(number):
    draw = random.Random(number)
    for _ in range(20):
        ramp = RampUp(draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 200))
        size = ramp.start + ramp.increment * draw.randint(1, 9)
        batch = GlobalBatch(size, draw.choice([None, ramp]))
        start, length, count = draw.randint(0, 250), draw.randint(0, 250), 0
        position = start
        while position + size_at(batch, position) <= start + length:
            assert batch.at(position) == size_at(batch, position)
            assert batch.after(start, count) == position
            position += size_at(batch, position)
            count += 1
        assert batch.count(start, start + length) == count
        assert batch.after(start, count) == position
    assert GlobalBatch(12, RampUp(4, 2, 100)).sizes == (4, 6, 8, 10, 12)


def test_global_batches_that_do_not_divide_or_contradict_are_refused():
    GlobalBatch(12).check(3, 2)
    check_refusals(GlobalBatch(12).check, [((4, 2), "12 is not one of 4 x 2 = 8")])
    check_refusals(
        GlobalBatch,
        [
            ((10, RampUp(3, 4, 10)), "start is 3, increment 4, global_batch_size 10"),
            ((10, RampUp(1, 20, 10)), "or another increment"),
        ],
    )
    check_refusals(
        GlobalBatch.of,
        [
            ((None, RampUp(1, 1, 1), None), "ramp_up needs global_batch_size"),
            ((8, None, 3), "batch_size (3) and global_batch_size (8)"),
        ],
    )
    accumulation = GlobalBatch(8).check_accumulation
    check_refusals(accumulation, [((True,), "accumulate_grad_batches above 1")])


def test_limits_on_rows_are_multiples_of_a_tile_and_suggested_factors_suffice():
    for factor, share, rows in ((1.0, 128, 128), (1.0, 129, 256), (1.01, 128, 256), (1.0, 0, 0)):
        assert limited_rows(factor, share) == rows
    draw = random.Random(1)
    assert smallest_factor(42_112, 32_768) == 1.29
    for _ in range(500):
        share = draw.randint(1, 10**6)
        needed = draw.randint(share, 8 * share)
        factor = smallest_factor(needed, share)
        assert limited_rows(factor, share) >= needed
        assert Fraction(round(factor * 100) - 1, 100) * share < needed, "no smaller one does"
        assert 0 <= grown_factor(needed, share) - 1.1 * needed / share < 0.0101
