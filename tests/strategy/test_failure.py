"""A rank that raises ends the whole job, and is the one that is heard."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lightning_megatron.strategy.failure import FailureWatch
from tests.strategy.scripts import run_script


@pytest.mark.parametrize("kind", ["raise", "hang"])
def test_a_failing_rank_ends_the_job_with_its_traceback_first(kind: str) -> None:
    done = run_script("run_failure", kind, "3", timeout=120)
    assert done.returncode != 0
    ours = done.stderr.index("ArithmeticError: the third batch is bad")
    assert "[rank 3] failed; the other ranks will be stopped." in done.stderr[:ours]
    assert done.stderr.count("Traceback (most recent call last)") == 1
    others = [match.start() for match in re.finditer(r"\[rank [012]\] (stops|waits)", done.stderr)]
    assert others
    assert min(others) > ours


def test_the_first_rank_claims_the_failure_and_the_others_refer_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = FailureWatch(2, num_local=2), FailureWatch(5, num_local=2)

    def fail(watch: FailureWatch, error: Exception, before: Callable[[], None] = lambda: None) -> None:
        with watch.guard():
            watch.join_job("job-of-this-test")
            before()
            raise error

    def first_fails() -> None:
        with pytest.raises(ZeroDivisionError):
            fail(first, ZeroDivisionError("the cause"))

    with pytest.raises(KeyError):
        fail(second, KeyError("what followed"), first_fails)
    first.cleanup_done()
    second.cleanup_done()
    told = capsys.readouterr().err
    assert (
        told.index("[rank 2] failed") < told.index("ZeroDivisionError: the cause") < told.index("[rank 5] stops after")
    )
    assert told.count("Traceback") == 1
    assert first.has_failed
    assert second.has_failed


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
def test_leaving_in_order_is_no_failure(leaving: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    watch = FailureWatch(0)
    with pytest.raises(leaving), watch.guard():
        raise leaving
    assert not watch.has_failed
    assert not capsys.readouterr().err
