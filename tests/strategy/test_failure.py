"""A rank that raises ends the whole job, and is the one that is heard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_megatron.strategy.failure import FailureWatch
from tests.strategy.scripts import ROOT, run_script


@pytest.mark.parametrize(("kind", "rank"), [("raise", 3), ("hang", 1)])
def test_a_failing_rank_ends_the_job_with_its_traceback_first(kind: str, rank: int) -> None:
    done = run_script("run_failure", kind, str(rank), timeout=120)
    assert done.returncode != 0
    ours = done.stderr.index("ArithmeticError: the third batch is bad")
    assert f"[rank {rank}] failed; the other ranks will be stopped." in done.stderr[:ours]
    assert done.stderr.count("Traceback (most recent call last)") == 1
    others = [match.start() for match in re.finditer(r"\[rank \d\] (stops|waits)", done.stderr)]
    # Ranks that hang may be stopped before they have said anything.
    assert others or kind == "hang"
    assert all(other > ours for other in others)


def test_the_first_rank_claims_the_failure_and_the_others_refer_to_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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


def processes_with(argument: str) -> list[str]:
    """List the processes that were started with an argument."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if has_argument(path, argument)]


def has_argument(path: Path, argument: str) -> bool:
    try:
        return argument in path.read_text(errors="replace")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} seconds"
        time.sleep(0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of processes from /proc")
def test_launched_ranks_end_after_the_process_that_launched_them() -> None:
    marker = f"marker-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.strategy.run_failure", "hang", "-1", marker],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stderr is not None
        while "waits forever" not in launcher.stderr.readline():
            assert launcher.poll() is None
        launcher.kill()
    wait_until(lambda: not processes_with(marker), 60)


def test_what_failed_jobs_left_is_removed_a_week_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = f"lightning_megatron_{os.getuid()}_"
    for name, age in ((f"{ours}old", 8), (f"{ours}young", 6), ("lightning_megatron_another_users", 8), ("other", 8)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "first").touch()
        os.utime(folder, (time.time() - age * 86400,) * 2)
    watch = FailureWatch(0)
    with watch.guard():
        watch.join_job("now")
        left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {f"{ours}young", f"{ours}now", "lightning_megatron_another_users", "other"}
