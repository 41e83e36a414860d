"""Results of a worker pool come in order, and its workers exit with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from lightning_megatron.data import worker_pool
from lightning_megatron.data.worker_pool import map_in_order


def worker_of(value: int) -> tuple[int, int]:
    return value, os.getpid()


def signalled(value: int) -> int:
    """Send SIGTERM to this worker during its work."""
    if value == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    if value == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def sleeping(value: int) -> int:
    signalled(value)
    time.sleep(5)
    return value


@pytest.mark.parametrize("workers", [0, 3])
def test_results_come_in_order(workers):
    results = list(map_in_order(worker_of, iter(range(40)), workers))
    assert [value for value, _ in results] == list(range(40))
    assert (os.getpid() in {process for _, process in results}) == (workers == 0)


def test_a_worker_survives_sigterm_for_the_grace_period_and_a_killed_worker_raises(monkeypatch):
    assert list(map_in_order(signalled, iter(range(7)), 2)) == list(range(7))
    with pytest.raises(BrokenProcessPool):
        list(map_in_order(signalled, iter(range(8)), 2))
    monkeypatch.setattr(worker_pool, "_GRACE_SECONDS", 0.2)
    with pytest.raises(BrokenProcessPool):
        list(map_in_order(sleeping, iter(range(4, 2, -1)), 2))


KILLED = """
import os, signal
from tests.data.test_worker_pool import worker_of
from lightning_megatron.data.worker_pool import map_in_order
results = map_in_order(worker_of, iter(range(100)), 2)
print({process for _, process in (next(results) for _ in range(9))}, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(process: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_with_a_killed_parent():
    completed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert completed.returncode == -signal.SIGKILL, completed.stderr
    workers = {int(process) for process in completed.stdout.strip("{}\n").split(",")}
    deadline = time.monotonic() + 60
    while workers := {process for process in workers if is_running(process)}:
        assert time.monotonic() < deadline, workers
        time.sleep(0.05)
