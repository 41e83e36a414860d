"""Progress of a training: a bar on a terminal, and a line for each logged step elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from typing_extensions import override

from lightning_megatron.models.token_module import total_steps
from lightning_megatron.plan.settings import Index, coerced_arguments
from lightning_megatron.strategy.callbacks.training_metrics import TrainingMetrics
from lightning_megatron.strategy.private.loops import callbacks_of, is_logged

#: Metrics of a line in their order, with label and format.
_LINE = {
    "train/gradient_norm": ("grad norm", "{:.3g}"),
    "train/learning_rate": ("lr", "{:.3g}"),
    "train/peak_memory_gib": ("memory", "{:.1f} GiB"),
    "train/tokens_per_second_per_gpu": ("tokens/s/GPU", "{:,.0f}"),
    "train/tflops_per_gpu": ("TFLOP/s", "{:.4g}"),
    "train/mfu": ("MFU", "{:.1%}"),
}
#: The same of a bar, which has less room; of MFU and TFLOP/s it shows one.
_BAR = {
    "train/tokens_per_second": ("tokens/s", "{:,.0f}"),
    "train/tflops_per_gpu": ("TFLOP/s", "{:.4g}"),
    "train/mfu": ("MFU", "{:.1%}"),
    "train/gradient_norm": ("norm", "{:.3g}"),
    "train/peak_memory_gib": ("memory", "{:.1f}GiB"),
}


class TokensProgressBar(TQDMProgressBar):
    """Show the loss of a training, what :class:`TrainingMetrics` measures, and the time left.

    On a terminal this is a bar with the steps, the values logged by ``prog_bar=True``, and of
    :class:`TrainingMetrics` tokens per second, MFU or TFLOP/s, gradient norm and memory. Where
    standard output is a file or a pipe, it is a line of text for every logged step. The token
    count covers all data-parallel ranks. The remaining time includes validation, at the average
    rate so far. Without a :class:`TrainingMetrics` among the Trainer's callbacks, the bar measures
    the same and logs nothing.

    Args:
        refresh_rate: Number of batches between two refreshes of the bar; 0 shows nothing (batches).
            Each refresh reads the logged values from the device, for which the host waits. Under
            MegatronStrategy, values logged only per step are not read between refreshes; other bars
            read them after every batch.
        json: Whether to print an object of JSON for every logged step, for programs: all metrics by
            their names, ``step``, ``steps`` and ``seconds_left``. Values that are not finite are
            null.
    """

    BAR_FORMAT_STEPS = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}"

    def __init__(self, refresh_rate: Index = 10, json: bool = False) -> None:
        arguments = coerced_arguments(TokensProgressBar.__init__, locals())
        super().__init__(arguments["refresh_rate"])
        self.json: bool = arguments["json"]
        self._writes_lines = False
        self._metrics = TrainingMetrics(metrics=[])
        self._started_at = 0.0
        self._first_step = 0
        self._num_steps: int | None = None
        self._kept: dict[str, torch.Tensor] = {}

    def keep_until_drawn(self, name: str, value: torch.Tensor) -> None:
        """Store a scalar on its device, which the bar reads only when it is drawn."""
        self._kept[name] = value

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.is_enabled and (self.json or not is_terminal()):
            self._writes_lines = True
            self.disable()
        self._metrics = next(iter(callbacks_of(trainer, TrainingMetrics)), self._metrics)
        if self._metrics not in trainer.callbacks:  # type: ignore[attr-defined]
            # A new list, because Lightning iterates over the one that there is.
            trainer.callbacks = [*trainer.callbacks, self._metrics]  # type: ignore[attr-defined]

    @override
    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = self.BAR_FORMAT_STEPS
        return bar

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_steps = count_steps(trainer)
        self._first_step = trainer.global_step
        self._started_at = time.monotonic()
        self._kept.clear()
        self.train_progress_bar = self.init_train_tqdm()
        self.train_progress_bar.total = self._num_steps

    @override
    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The metrics may stand behind this callback.
        self._metrics.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._writes_lines and is_logged(trainer) and trainer.global_step > self._first_step:
            print(self._line(trainer, pl_module), flush=True)
        is_end = trainer.global_step == self._num_steps and self.is_enabled
        if self._should_update(batch_idx + 1, -1) or is_end:
            self.train_progress_bar.n = trainer.global_step
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def _line(self, trainer: Trainer, module: LightningModule) -> str:
        """Return the line of a logged step."""
        step = trainer.global_step
        logged = self._logged(trainer, module)
        values = self._metrics.values
        seconds_left = self._seconds_left(step)
        if self.json:
            numbers = {
                name: value if math.isfinite(value) else None
                for name, value in (logged | values).items()
            }
            place = {"step": step, "steps": self._num_steps, "seconds_left": seconds_left}
            return json.dumps(place | numbers)
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        parts = [f"step {step}{total}"]
        parts += [f"{name} {value:.4g}" for name, value in logged.items()]
        parts += [f"{label} {text}" for label, text in _shown(values, _LINE).items()]
        if seconds_left is not None:
            parts.append(f"left {timedelta(seconds=round(seconds_left))}")
        return "  ".join(parts)

    def _logged(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """Return the values that are logged for the bar, without Lightning's version number."""
        metrics: dict[str, Any] = super().get_metrics(trainer, module)
        metrics.pop("v_num", None)
        return metrics | {name: value.item() for name, value in self._kept.items()}

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict]:
        metrics = self._logged(trainer, pl_module)
        shown = _shown(self._metrics.values, _BAR)
        if "MFU" in shown:
            del shown["TFLOP/s"]
        metrics |= shown
        seconds_left = self._seconds_left(trainer.global_step)
        if seconds_left is not None:
            metrics["left"] = str(timedelta(seconds=round(seconds_left)))
        return metrics

    def _seconds_left(self, step: int) -> float | None:
        steps_done = step - self._first_step
        if self._num_steps is None or steps_done <= 0:
            return None
        return (time.monotonic() - self._started_at) / steps_done * max(self._num_steps - step, 0)


def is_terminal() -> bool:
    """Return whether standard output shows a bar: a terminal, or a notebook."""
    return sys.stdout.isatty() or hasattr(sys, "ps1")


def _shown(values: dict[str, float], figures: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return the texts of the metrics that there are, by their labels."""
    return {
        label: form.format(values[name])
        for name, (label, form) in figures.items()
        if name in values
    }


def count_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole ``fit``; None if they depend on the data's end."""
    num_steps = total_steps(trainer)
    return None if math.isinf(num_steps) or num_steps < 0 else int(num_steps)
