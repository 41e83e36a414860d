"""Hooks whose code may read gradients are distinguished from hooks that do not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_megatron.strategy.optimization.parameter_readers import gradient_reader


class Counts(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        with torch.no_grad(), torch.autograd.profiler.record_function("count"):
            self.count = sum(
                weight.numel() for weight in module.parameters() if weight.requires_grad
            )


class Reads(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.value = [weight.grad for weight in module.parameters()]


def largest_value(module: torch.nn.Module) -> float:
    return max(
        float(weight.grad.abs().max()) for weight in module.parameters() if weight.grad is not None
    )


class ReadsByFunction(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.value = largest_value(module)


class Before(L.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        self.count = 1


class Norm(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.value = trainer.precision_plugin.last_grad_norm  # type: ignore[attr-defined]


class Denies(Reads):
    reads_gradients = False


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        (Counts, None),
        (Norm, None),
        (Denies, None),
        (Reads, "Reads.on_train_batch_end"),
        (ReadsByFunction, "ReadsByFunction.on_train_batch_end"),
        (Before, "Before.on_before_optimizer_step"),
    ],
)
def test_first_hook_that_may_read_gradients_is_named(
    callback: type[L.Callback], name: str | None
) -> None:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback()]
    )
    trainer.strategy.connect(L.LightningModule())
    assert gradient_reader(trainer) == name
