"""A rank that others wait for is named once, with what it is slow in; an even run names none."""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ParallelPlanError, SpeedWarning
from lightning_megatron.strategy.callbacks.stragglers import (
    RankTimes,
    StragglerWatch,
    find_stragglers,
)
from tests.fits import GPT2, Job, Language, Tokens, run_job
from tests.world import run_world

#: Batches between two comparisons, all of which are compared.
STEPS = 6
#: A slow rank takes more than thrice the time of the others, also on a busy machine.
ABOVE = 2.0
PAUSE = 0.6


class SlowTokens(Tokens):
    """Tokens that a rank waits for."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(PAUSE / 4)
        return super().__getitem__(index)


class SlowSteps(Language):
    """A GPT whose step sleeps, or computes the loss several times more, in some of its batches."""

    def __init__(self, pauses: float, repeats: int, batches: range) -> None:
        super().__init__(GPT2)
        self.pauses, self.repeats, self.batches = pauses, repeats, batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.fit_loop.total_batch_idx in self.batches:
            time.sleep(self.pauses)
            for _ in range(self.repeats):
                torch.full((400, 400), 1 / 400, dtype=torch.float64).matrix_power(500)
        return super().training_step(batch, batch_idx)


def fit(rank: int, slow: int, case: str, layout: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the slow ranks and parts after the fit, and the warnings of this rank."""
    is_slow = rank == slow
    batches = range(STEPS, 2 * STEPS) if case == "episode" else range(100)
    pauses = PAUSE if is_slow and case in ("sleeps", "episode") else 0.0
    repeats = 16 if is_slow and case == "computes" else 0
    data = SlowTokens if is_slow and case == "data" else Tokens
    watch = StragglerWatch(ABOVE, num_steps=STEPS, interval=STEPS)
    steps = 4 * STEPS if case == "episode" else 2 * STEPS
    job = Job(
        partial(SlowSteps, pauses, repeats, batches),
        {"microbatch_size": "batch", **layout},
        steps=steps,
        data=partial(data, steps * 8),
        callbacks=lambda: [watch],
        norms=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_job(job, 4)
    texts = [str(one.message) for one in caught if one.category is SpeedWarning]
    return [(one.times.rank, one.parts) for one in watch.slow.values()], texts


CASES: dict[str, tuple[int, str, dict[str, Any], tuple[str, ...]]] = {
    "even": (0, "even", {"tp": 2}, ()),
    "sleeps": (2, "sleeps", {"tp": 2}, ("computing",)),
    "computes": (1, "computes", {}, ("computing",)),
    "data": (3, "data", {"tp": 2}, ("loading data",)),
    "stage": (1, "sleeps", {"tp": 2, "pp": 2}, ("computing",)),
    "episode": (3, "episode", {"tp": 2}, ()),
}


def fit_all(rank: int, size: int) -> dict[str, tuple[list[Any], list[str]]]:
    return {name: fit(rank, *case[:3]) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[list[Any], list[str]]]]:
    return run_world(fit_all, 4)


@pytest.mark.parametrize("name", CASES)
def test_the_slow_rank_and_its_slow_part_are_named_once_on_rank_0(name, outcomes):
    rank, case, _, parts = CASES[name]
    assert all(outcome[name][1] == [] for outcome in outcomes[1:])
    texts = outcomes[0][name][1]
    found = [(rank, parts)] if parts else []
    assert [outcome[name][0] for outcome in outcomes] == [found] * 4, texts
    assert len(texts) == (case != "even"), texts
    for text in texts:
        assert text.startswith(f"all ranks wait for rank {rank} (host ")
        assert f", CPU), which is slow in {' and '.join(parts or ('computing',))}: steps " in text


def times_of(rank: int, own: float, data: float = 0.0, stage: int = 0) -> RankTimes:
    return RankTimes(rank, stage, f"host n{rank}, GPU {rank}", (own,) * 20, (data,) * 20)


def test_ranks_are_compared_within_their_stage_and_all_slow_parts_are_named() -> None:
    even = [times_of(rank, 0.1, 0.01) for rank in range(3)]
    # The second stage has more work, which is no rank's fault.
    second = [times_of(3 + rank, 0.2, stage=1) for rank in range(2)]
    slow = [times_of(5, 0.2, 0.06), times_of(6, 0.112, 0.022), times_of(7, 0.109, 0.019)]
    found = find_stragglers([*even, *second, *slow], 0.1)
    assert [(one.times.rank, one.parts) for one in found] == [
        (5, ("loading data", "computing")),
        (6, ("loading data",)),
    ]
    assert found[0].report(81, 100) == (
        "all ranks wait for rank 5 (host n5, GPU 5), which is slow in loading data and computing: "
        "steps 81 to 100 take it 200.0 ms each without waits (60.0 of them for data), and the other "
        "ranks of stage 0 100.0 ms: 100% more.\nLook at the disk and the processors of that host, "
        "or raise num_workers. Compare its GPU with others by `lightning-megatron doctor --measure` "
        "on that host, and look for code that runs on this rank alone."
    )
    # Three of twenty steps are pauses, which the median does not see, and neither do most steps.
    pauses = RankTimes(1, 0, "", (0.1,) * 17 + (0.9,) * 3, (0.0,) * 20)
    seldom = RankTimes(1, 0, "", (0.1,) * 8 + (0.2,) * 12, (0.0,) * 20)
    assert not find_stragglers([times_of(0, 0.1), pauses], 0.1)
    assert not find_stragglers([times_of(0, 0.1), seldom], 0.1)
    # Alone on its stage, a rank has none to be compared with.
    assert not find_stragglers([times_of(0, 0.1), times_of(1, 0.9, stage=1)], 0.1)


def test_watch_refuses_an_interval_that_is_too_short() -> None:
    with pytest.raises(
        ParallelPlanError, match=r"interval \(5\) must be at least num_steps \(20\)"
    ):
        StragglerWatch(interval=5)
