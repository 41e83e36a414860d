"""The one replaced loop of Lightning: its closure runs a schedule over the microbatches of a batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.strategy.private import (
    AutomaticOptimization,
    Closure,
    ClosureResult,
    automatic_optimization,
    call_strategy_step,
    replace_automatic_optimization,
)


class ScheduledClosure(Closure):
    """Forget the gradients first, then run forward and backward of all microbatches.

    Lightning's order is forward, forget, backward; a schedule has made gradients by the time its forward passes end.
    """

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        return self._step_fn()


class ScheduledOptimization(AutomaticOptimization):
    """Run one optimizer step, whose forward and backward passes the strategy's ``training_step`` owns."""

    @override
    def _make_closure(self, kwargs: OrderedDict, optimizer: Optimizer, batch_idx: int) -> Closure:
        return ScheduledClosure(self._make_step_fn(kwargs), None, self._make_zero_grad_fn(batch_idx, optimizer))

    @override
    def _training_step(self, kwargs: OrderedDict) -> ClosureResult:
        output = call_strategy_step(self.trainer, tuple(kwargs.values()))
        # The strategy has divided by the number of accumulated batches already.
        return ClosureResult.from_training_step_output(output)


def install_scheduled_loop(trainer: Trainer) -> None:
    """Make the trainer's automatic optimization scheduled, once; its counters go on."""
    if not isinstance(automatic_optimization(trainer), ScheduledOptimization):
        replace_automatic_optimization(trainer, ScheduledOptimization(trainer))
