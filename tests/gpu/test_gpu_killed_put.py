"""Tests that a rank that is killed while it writes to the memory of a peer ends the job by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.shared_gpu import require_gpus

ROOT = Path(__file__).parents[2]
#: Time limit for imports, steps, and the end of the job after the rank is killed (s).
PATIENCE = 120.0


def check_killed_job(accelerator: str, payload: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run_killed_put", accelerator, payload],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "[rank 1] was ended by SIGKILL; the other ranks will be stopped." in process.stderr, (
        process.stderr
    )
    assert process.returncode != 0
    assert "the training has ended" not in process.stdout


def test_a_rank_that_is_killed_in_a_collective_on_the_cpu_is_named():
    check_killed_job("cpu", "tokens")


@pytest.mark.gpu2
@pytest.mark.parametrize("payload", ["tokens", "weights"])
def test_a_rank_that_is_killed_inside_a_put_is_named(payload):
    require_gpus(2)
    check_killed_job("cuda", payload)
