"""A job with a rank that does not arrive ends before its timeout, and reports the rank, its line
and its step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.run_hang import TIMEOUT
from tests.sweeps import chosen

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", chosen(["sleep", "stop"], "sleep"))
def test_a_hanging_rank_is_reported_with_its_line_the_collective_and_the_step(kind: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults.run_hang", kind, "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode != 0
    report, _, waiting = result.stderr.partition("did not arrive:")[2].partition("wait for them:")
    assert re.search(r"rank 1 \(.*\): train, global_step \d", report), result.stderr
    assert "rank 0" not in report
    assert "rank 2" not in report
    assert re.search(
        r"rank 0: train, global_step 2; in all_reduce over dp \(number \d+ there, ranks 0, 1, 2",
        waiting,
    )
    assert result.stderr.count("did not arrive:") == 1
    if kind == "sleep":
        assert "run_hang.py" in report
        assert "in training_step" in report
    else:
        assert "no status report for" in report
    waited = re.search(rf"has waited for (\d+) s of a timeout of {TIMEOUT:.0f} s", result.stderr)
    assert waited is not None
    assert int(waited[1]) <= TIMEOUT
