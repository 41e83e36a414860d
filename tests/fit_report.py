"""Record of the results of a fit, for a comparison with the same training in a plain loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_megatron.training.clip import grad_norm


@dataclass
class Report:
    """Hold the results of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Record(pl.Callback):
    """Callback that records the loss and the gradient norm of every step."""

    def __init__(self) -> None:
        self.report = Report()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the norm of the gradients."""
        self.report.norms.append(float(grad_norm(trainer.strategy.run.state.main)))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Record the loss."""
        self.report.losses.append(float(trainer.callback_metrics["train_loss"]))
