"""A job with a rank that does not arrive ends before its timeout, and reports the rank, its line and
its step. `python -m tests.faults.test_hang sleep 1` makes rank 1 of three hang.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.fits import Job, Language, Tokens, trainer_of
from tests.sweeps import chosen
from tests.worlds.user_script import ROOT, environment

#: Time that a collective may wait (seconds).
TIMEOUT = 15.0


class Hangs(Language):
    """Hang at the third batch of one rank: ``sleep`` in Python, or ``stop`` the process."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.kind, self.hanging_rank = kind, rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and torch.distributed.get_rank() == self.hanging_rank:
            if self.kind == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)  # the line that the report names
        return super().training_step(batch, batch_idx)


def hang() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = trainer_of(Job(strategy={"job.timeout": TIMEOUT}, precision="32-true", steps=8), 3)
    trainer.fit(Hangs(sys.argv[1], int(sys.argv[2])), DataLoader(Tokens(32), batch_size=4))


@pytest.mark.parametrize("kind", chosen(["sleep", "stop"], "sleep"))
def test_a_hanging_rank_is_reported_with_its_line_the_collective_and_the_step(kind: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults.test_hang", kind, "1"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    report, _, waiting = result.stderr.partition("did not arrive:")[2].partition("wait for them:")
    assert re.search(r"rank 1 \(.*\): train, global_step \d", report), result.stderr
    assert not re.search("rank [02]", report)
    collective = r"in all_reduce over dp \(number \d+ there, ranks 0, 1, 2"
    assert re.search(rf"rank 0: train, global_step 2; {collective}", waiting), result.stderr
    assert result.stderr.count("did not arrive:") == 1
    words = "test_hang.py" if kind == "sleep" else "no status report for"
    assert words in report
    assert "in training_step" in report or kind == "stop"
    waited = re.search(rf"has waited for (\d+) s of a timeout of {TIMEOUT:.0f} s", result.stderr)
    assert waited is not None
    assert int(waited[1]) <= TIMEOUT


if __name__ == "__main__":
    hang()
