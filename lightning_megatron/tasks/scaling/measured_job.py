"""Programs that measure steps and may fail alone, and the reasons of their failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: What a job prints if a device or the host has too little memory, in lower case.
_MEMORY = ("outofmemory", "out of memory", "can't allocate memory", "cannot allocate memory")


def run_job(command: Sequence[str], log: Path, timeout: int) -> str | None:
    """Run a program until it ends; kill its processes after the timeout or an interruption.

    Args:
        command: The program and its arguments.
        log: File that receives its standard output and standard error.
        timeout: Longest duration of the program (seconds).

    Returns:
        Reason why the program failed; None after exit code 0.
    """
    with log.open("wb") as file:
        job = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            job.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout} s (--timeout)"
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return reason_in(log.read_text(errors="replace"), job.returncode) if job.returncode else None


def measure_job(command: Sequence[str], log: Path, result: Path, timeout: int) -> dict[str, Any]:
    """Run a program that measures steps by ``StepTimer``; see :func:`run_job` for the arguments.

    Args:
        result: File of the measurements that the program writes; an old one is removed.

    Returns:
        The measurements, and under ``failure`` an empty text; after a failure only its reason.
    """
    result.unlink(missing_ok=True)
    failure = run_job(command, log, timeout)
    if failure is None and not result.is_file():
        failure = "the data ended before the last measured step"
    return {"failure": failure} if failure else {**json.loads(result.read_text()), "failure": ""}


def reason_in(text: str, returncode: int) -> str:
    """Return the reason why a job failed, from its output.

    Args:
        text: Output of the job.
        returncode: Exit code of its first process; negative for a signal.
    """
    if any(word in text.lower() for word in _MEMORY):
        return "out of memory"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}, perhaps for lack of host memory"
    errors = [line for line in text.splitlines() if "Error: " in line and line[:1].isalpha()]
    messages = errors or [line for line in text.splitlines() if line.strip()] or ["no output"]
    return f"exit code {returncode}: {messages[-1].strip()[:300]}"
