"""Progress bar with tokens per second and the remaining time."""

from __future__ import annotations

import math
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from typing_extensions import override

from lightning_megatron.models.token_module import total_steps
from lightning_megatron.pipeline.microbatch import count_tokens
from lightning_megatron.plan.settings import Index, coerced_arguments


def count_replicas(trainer: Trainer) -> int:
    """Return the number of data replicas; tensor and pipeline ranks count once."""
    return getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)


class TokenRate:
    """Tokens per second over the last batches, without pauses.

    Args:
        window: Number of batches that the rate covers (batches).
    """

    def __init__(self, window: int = 50) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=window)
        self._since: float | None = None

    def start(self, now: float) -> None:
        """Start or resume the measurement."""
        self._since = now

    def pause(self) -> None:
        """Pause the measurement until the next start."""
        self._since = None

    def add(self, num_tokens: int, now: float) -> None:
        """Add a batch that has just ended."""
        if self._since is not None:
            self._batches.append((num_tokens, now - self._since))
        self._since = now

    @property
    def per_second(self) -> float:
        """Tokens per second; 0 before the first batch."""
        seconds = sum(duration for _, duration in self._batches)
        return sum(num_tokens for num_tokens, _ in self._batches) / seconds if seconds > 0 else 0.0


class TokensProgressBar(TQDMProgressBar):
    """Progress bar with steps, values logged by ``prog_bar=True``, tokens per second and ETA.

    The token count covers all data-parallel ranks, and counts the batch that all ranks of a tensor
    or pipeline group share once. The remaining time includes validation, at the average rate so
    far.

    Args:
        refresh_rate: Number of batches between two refreshes (batches). Each refresh reads the
            logged values from the device, for which the host waits. Under MegatronStrategy, values
            logged only per step are not read between refreshes; other bars read them after every
            batch.
    """

    BAR_FORMAT_STEPS = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}"

    def __init__(self, refresh_rate: Index = 10) -> None:
        super().__init__(**coerced_arguments(TokensProgressBar.__init__, locals()))
        self._rate = TokenRate()
        self._started_at = 0.0
        self._first_step = 0
        self._num_steps: int | None = None
        self._kept: dict[str, torch.Tensor] = {}

    def keep_until_drawn(self, name: str, value: torch.Tensor) -> None:
        """Store a scalar on its device, which the bar reads only when it is drawn."""
        self._kept[name] = value

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
        self._rate = TokenRate()
        self._rate.start(self._started_at)
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
        if self.is_disabled:
            return
        self._rate.add(count_tokens(batch) * count_replicas(trainer), time.monotonic())
        if self._should_update(batch_idx + 1, -1) or trainer.global_step == self._num_steps:
            self.train_progress_bar.n = trainer.global_step
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rate.pause()
        super().on_validation_start(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._rate.start(time.monotonic())

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        metrics |= {name: value.item() for name, value in self._kept.items()}
        if self._rate.per_second:
            metrics["tokens/s"] = f"{self._rate.per_second:,.0f}"
        seconds_left = self._seconds_left(trainer.global_step)
        if seconds_left is not None:
            metrics["left"] = str(timedelta(seconds=round(seconds_left)))
        return metrics

    def _seconds_left(self, step: int) -> float | None:
        steps_done = step - self._first_step
        if self._num_steps is None or steps_done <= 0:
            return None
        return (time.monotonic() - self._started_at) / steps_done * max(self._num_steps - step, 0)


def count_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole ``fit``; None if they depend on the data's end."""
    num_steps = total_steps(trainer)
    return None if math.isinf(num_steps) or num_steps < 0 else int(num_steps)
