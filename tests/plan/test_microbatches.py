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
    for whole in (rule(), rule("batch"), rule("batch", pp=4)):
        assert whole.is_whole
        assert (whole.size_for(num_samples), whole.count_for(num_samples)) == (num_samples, 1)


def test_a_given_size_is_kept() -> None:
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
    found = rule(pp=pp, vpp=vpp)
    assert found.is_chosen
    assert found.count_for(num_samples) == count
    assert found.size_for(num_samples) * count == num_samples
    assert count == num_samples or found.idle_share(count) <= 0.2


@pytest.mark.parametrize(
    ("schedule", "vpp", "count"),
    [("zb-h1", 1, 4), ("zb-h2", 1, 6), ("zb-v", 2, 4), ("dualpipe-v", 2, 8)],
)
def test_schedules_with_halves_need_fewer_microbatches(schedule, vpp, count) -> None:
    found = MicrobatchRule(None, schedule, 4, vpp, None)
    assert rule(pp=4).count_for(48) == 12
    assert found.count_for(48) == count
    assert found.idle_share(count) <= 0.2


@pytest.mark.parametrize("num_samples", range(1, 100))
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_fewer_microbatches_would_idle_longer(pp: int, vpp: int, num_samples: int) -> None:
    found = rule(pp=pp, vpp=vpp)
    count = found.count_for(num_samples)
    fewer = [n for n in range(1, count) if num_samples % n == 0 and found.can_run(n)]
    assert num_samples % count == 0
    assert all(found.idle_share(n) > 0.2 for n in fewer)
    if found.can_run(num_samples):
        found.check(num_samples)


def test_the_group_of_an_interleaved_schedule_is_respected() -> None:
    assert rule(pp=4, vpp=2, group=6).count_for(60) == 6
    assert rule(pp=4, vpp=2, group=7).count_for(64) == 32


def test_a_batch_that_no_count_fits_is_refused_by_the_schedule() -> None:
    with pytest.raises(
        ParallelPlanError,
        match="needs at least as many microbatches as stages: num_microbatches is 3",
    ):
        rule(pp=4, vpp=2).check(3)
