"""An interrupted training ends with the same bits as an uninterrupted one.

For many kills, run `pytest tests/faults/test_restarts.py --kills 30`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.agent import (
    assert_same_end,
    attempts,
    finish,
    kill_one,
    newest_step,
    outputs,
    repeated_in,
    standalone,
    started,
    wait_until,
)
from tests.faults.train import Job, write_corpus
from tests.sweeps import chosen

SAVE_EVERY = 4


@pytest.fixture(scope="module")
def num_kills(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--kills", 2)


@pytest.fixture(scope="module")
def undisturbed(num_kills: int, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Train without interruption, long enough to spread the kills over the training."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_corpus(folder)
    job = Job(folder=str(folder), steps=max(24, 8 * num_kills), save_every=SAVE_EVERY)
    with started(job, *standalone()) as process:
        assert finish(process) == 0, outputs(job)
    return job


@pytest.mark.parametrize("async_save", chosen([False, True], True))
def test_killed_ranks_cost_only_the_steps_since_the_last_complete_save(
    async_save: bool,
    num_kills: int,
    undisturbed: Job,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    job = repeated_in(undisturbed, tmp_path, async_save=async_save, seconds=0.02)
    draw = random.Random(f"{request.config.getoption('--kill-seed', 0)} {async_save}")
    kills = []
    with started(job, *standalone(max_restarts=10 * num_kills)) as process:
        wait_until(lambda: bool(attempts(job) and attempts(job, 1)), "the first start", process)
        for number in range(num_kills):
            target = (job.steps - 2 * SAVE_EVERY) * number // num_kills + draw.randint(
                1, SAVE_EVERY
            )
            kills.append(kill_one(job, process, target, draw))
            print(f"{time.strftime('%X')} {number + 1}: {kills[-1]}", flush=True)
        assert finish(process) == 0, outputs(job)
    assert len(attempts(job)) > num_kills
    for kill in kills:
        attempt = attempts(job)[kill.attempt]
        # An attempt that is killed early has not resumed. Rank 0 saves a step before it logs the
        # end of the step.
        assert attempt.resumed is None or kill.complete <= attempt.resumed <= kill.last_step + 1, (
            kill,
            attempt,
        )
        # One save may still run in the background when the next one is due.
        assert attempt.resumed is None or kill.last_step - attempt.resumed <= SAVE_EVERY * (
            2 if async_save else 1
        )
    assert_same_end(job, undisturbed)


@pytest.mark.parametrize("launcher", chosen(["torchrun", "own"], "own"))
def test_a_terminated_job_saves_its_step_and_continues_there(launcher, undisturbed, tmp_path):
    job = repeated_in(undisturbed, tmp_path, seconds=0.3)
    arguments = standalone() if launcher == "torchrun" else ()
    with started(job, *arguments) as process:
        wait_until(
            lambda: bool(attempts(job)) and attempts(job)[-1].last_step >= 6, "step 6", process
        )
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        # A scheduler signals all processes, not only the launcher, and some schedulers repeat the
        # signal.
        for rank in (0, 1):
            with suppress(ProcessLookupError):
                os.kill(attempts(job, rank)[-1].pid, signal.SIGTERM)
        code = finish(process)
    # torchrun has other exit codes for a job that ends by a signal, because one of its threads may
    # abort it at the exit.
    assert code in ((1, -signal.SIGABRT) if launcher == "torchrun" else (143,)), outputs(job)
    (first,) = attempts(job)
    assert first.last_step < job.steps
    assert newest_step(job) == first.last_step == first.saved[-1]
    assert "failed; the other ranks" not in outputs(job)
    resumed_job = replace(job, seconds=0.0)
    with started(resumed_job, *arguments) as process:
        assert finish(process) == 0, outputs(job)
    assert attempts(job)[-1].resumed == first.last_step
    assert_same_end(job, undisturbed)
