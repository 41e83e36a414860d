"""A rank that is killed while it puts rows into the memory of another ends the job with its name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.shared_gpu import require_gpus

ROOT = Path(__file__).parents[2]
#: Time for imports and steps, and after the death of the rank (s).
PATIENCE = 120.0


def killed(accelerator: str, what: str) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run_killed_put", accelerator, what],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "[rank 1] was ended by SIGKILL; the other ranks will be stopped." in done.stderr, (
        done.stderr
    )
    assert done.returncode != 0
    assert "the training has ended" not in done.stdout
    # Long before the 60 s after which a collective gives up.
    assert time.monotonic() - start < PATIENCE


def test_a_killed_rank_is_named_where_collectives_stand_for_puts() -> None:
    killed("cpu", "tokens")


@pytest.mark.gpu2
@pytest.mark.parametrize("what", ["tokens", "weights"])
def test_a_rank_that_is_killed_inside_a_put_is_named(what: str) -> None:
    require_gpus(2)
    killed("cuda", what)
