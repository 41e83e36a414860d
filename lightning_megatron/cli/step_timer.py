"""Callback that measures the time of a training step for the subcommands that compare speeds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


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
