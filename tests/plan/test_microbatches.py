"""Batches are split as the user requests, not at all, or so that pipeline stages stay busy."""

from __future__ import annotations

import pytest

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.microbatches import MicrobatchRule


def rule(
    size: object = None, pp: int = 1, vpp: int = 1, group: int | None = None
) -> MicrobatchRule:
    return MicrobatchRule(size, "interleaved" if vpp > 1 else "1f1b", pp, vpp, group)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_samples", [1, 7, 64])
def test_without_stages_or_by_request_a_batch_is_one_microbatch(num_samples: int) -> None:
    for single in (rule(), rule("batch"), rule("batch", pp=4)):
        assert single.is_whole
        assert (single.size_for(num_samples), single.count_for(num_samples)) == (num_samples, 1)


def test_a_given_microbatch_size_is_used() -> None:
    assert not rule(3).is_whole
    assert (rule(3).size_for(8), rule(3).count_for(8)) == (3, 3)


@pytest.mark.parametrize(
    ("pp", "vpp", "num_samples", "count"),
    [
        (2, 1, 8, 4),
        (2, 1, 64, 4),
        (2, 1, 6, 6),
        (4, 1, 64, 16),
        (4, 1, 8, 8),
        (4, 1, 7, 7),
        (8, 1, 64, 32),
    ]
    + [(4, 2, 64, 8), (4, 2, 60, 12), (4, 3, 64, 4), (2, 2, 4, 2), (4, 1, 1, 1)],
)
def test_stages_are_idle_for_at_most_a_fifth_of_a_step(
    pp: int, vpp: int, num_samples: int, count: int
) -> None:
    automatic = rule(pp=pp, vpp=vpp)
    assert automatic.is_chosen
    assert automatic.count_for(num_samples) == count
    assert automatic.size_for(num_samples) * count == num_samples
    assert count == num_samples or automatic.idle_share(count) <= 0.2


@pytest.mark.parametrize(
    ("schedule", "vpp", "count"),
    [("zb-h1", 1, 4), ("zb-h2", 1, 6), ("zb-v", 2, 4), ("dualpipe-v", 2, 8)],
)
def test_schedules_with_split_backwards_need_fewer_microbatches(schedule, vpp, count) -> None:
    automatic = MicrobatchRule(None, schedule, 4, vpp, None)
    assert rule(pp=4).count_for(48) == 12
    assert automatic.count_for(48) == count
    assert automatic.idle_share(count) <= 0.2


@pytest.mark.parametrize("num_samples", range(1, 100))
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_fewer_microbatches_leave_stages_idle_for_more_than_a_fifth_of_a_step(
    pp: int, vpp: int, num_samples: int
) -> None:
    automatic = rule(pp=pp, vpp=vpp)
    count = automatic.count_for(num_samples)
    fewer = [n for n in range(1, count) if num_samples % n == 0 and automatic.can_run(n)]
    assert num_samples % count == 0
    assert all(automatic.idle_share(n) > 0.2 for n in fewer)
    if automatic.can_run(num_samples):
        automatic.check(num_samples)


def test_the_group_of_an_interleaved_schedule_is_respected() -> None:
    assert rule(pp=4, vpp=2, group=6).count_for(60) == 6
    assert rule(pp=4, vpp=2, group=7).count_for(64) == 32


def test_a_batch_of_fewer_samples_than_stages_is_refused_by_the_schedule() -> None:
    with pytest.raises(
        ParallelPlanError,
        match="needs at least as many microbatches as stages: num_microbatches is 3",
    ):
        rule(pp=4, vpp=2).check(3)
