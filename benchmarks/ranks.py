"""Launcher of a program on all ranks of one machine, which reports the reason for a failure.

Unlike torchrun, the launcher needs no additional process, which would have to import torch first.
If a rank fails, the launcher soon kills the ranks that wait for it.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

#: Time for the other ranks to print their errors after one rank has failed (s).
_GRACE = 3.0
_POLL = 0.05
#: Range of ports that Linux does not assign to programs that ask for any free port.
_PORTS = (10_000, 32_000)
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .*)")


@dataclass(frozen=True)
class Outcome:
    """Output and end of a program.

    Args:
        output: Output of all ranks.
        failure: Reason for the failure, in one line; empty without a failure.
        seconds: Time until the end of the last rank (s).
    """

    output: str
    failure: str
    seconds: float


def run_ranks(
    line: Sequence[str],
    num_ranks: int,
    log: Path,
    timeout: float,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a Python program on all ranks and return its outcome.

    Args:
        line: Arguments of the Python interpreter.
        num_ranks: Number of ranks.
        log: File for the output of all ranks.
        timeout: Time after which the ranks are killed (s).
        variables: Additional environment variables; PYTHONPATH is put before other folders.
    """
    variables = dict(variables or {})
    root = str(Path(__file__).parents[1])
    folders = (variables.pop("PYTHONPATH", ""), root, os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("w") as file:
        ranks = [
            subprocess.Popen(
                [sys.executable, *line],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_ranks)
        ]
        try:
            is_late = _wait(ranks, start + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    output = log.read_text(errors="replace")
    seconds = time.perf_counter() - start
    if is_late:
        return Outcome(output, f"stopped after {timeout:.0f} s; {last_error(output)}", seconds)
    failed = any(process.returncode for process in ranks)
    return Outcome(output, last_error(output) if failed else "", seconds)


def gpu_of(rank: int) -> torch.device:
    """Return the GPU of a rank of this machine; ranks share GPUs if there are fewer GPUs."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def last_error(output: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    return (errors or lines or ["no output"])[-1][:300].replace("|", "/")


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all ranks have ended or one has failed; return whether the deadline passed."""
    while any(process.poll() is None for process in ranks):
        if time.perf_counter() > deadline:
            return True
        if any(process.poll() for process in ranks):
            deadline_of_others = time.perf_counter() + _GRACE
            while time.perf_counter() < deadline_of_others and None in [r.poll() for r in ranks]:
                time.sleep(_POLL)
            return False
        time.sleep(_POLL)
    return False


def _free_port() -> int:
    """Return a free port below the range of ports that the system assigns.

    The ranks open the port seconds later. Until then, the system could assign a port of its range
    to another program.
    """
    generator = random.SystemRandom()
    while True:
        port = generator.randrange(*_PORTS)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
