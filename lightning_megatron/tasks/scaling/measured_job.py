"""Programs that measure steps and may fail alone, and the reasons of their failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

#: What a job prints if a device or the host has too little memory, in lower case.
_MEMORY = ("outofmemory", "out of memory", "can't allocate memory", "cannot allocate memory")


class StepTimer(Callback):
    """Measure the mean time of consecutive steps after warm-up steps.

    The host waits for the device only before the first and after the last measured step, so that
    steps overlap as in training. A step is an optimizer step with all its microbatches.

    Args:
        warmup: Number of steps before the measured ones (steps).
        steps: Number of measured steps (steps).
        path: JSON file that rank 0 writes after the last measured step, with
            ``seconds_per_step``, ``loss`` of that step (None if the training step returns none),
            ``peak_gib`` (None on CPUs), ``device`` and ``num_ranks``.
    """

    def __init__(self, warmup: int, steps: int, path: str) -> None:
        self._warmup = warmup
        self._steps = steps
        self._path = path
        self._done = 0
        self._start = 0.0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done += 1
        if self._done == self._warmup:
            self._start = _now()
        if self._done == self._warmup + self._steps:
            seconds = (_now() - self._start) / self._steps
            if trainer.is_global_zero:
                Path(self._path).write_text(json.dumps(_measured(trainer, seconds, outputs)))


def _measured(trainer: Trainer, seconds: float, outputs: Any) -> dict[str, Any]:
    has_loss = isinstance(outputs, Mapping) and outputs.get("loss") is not None
    measured: dict[str, Any] = {"seconds_per_step": seconds, "num_ranks": trainer.world_size}
    measured["loss"] = float(outputs["loss"]) if has_loss else None
    measured |= {"peak_gib": None, "device": "CPU"}
    if _on_gpu():
        measured["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measured["device"] = torch.cuda.get_device_name()
    return measured


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _now() -> float:
    if _on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def run_job(command: Sequence[str], log: Path, timeout: int) -> str | None:
    """Run a program until it ends; kill its processes after the timeout or an interruption.

    Args:
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
        returncode: Exit code of its first process; negative for a signal.
    """
    if any(word in text.lower() for word in _MEMORY):
        return "out of memory"
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}, perhaps for lack of host memory"
    errors = [line for line in text.splitlines() if "Error: " in line and line[:1].isalpha()]
    messages = errors or [line for line in text.splitlines() if line.strip()] or ["no output"]
    return f"exit code {returncode}: {messages[-1].strip()[:300]}"
