"""Optimization loop of Lightning whose closure runs a pipeline schedule over microbatches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.strategy.private.loops import (
    AutomaticOptimization,
    Closure,
    ClosureResult,
    automatic_optimization,
    call_strategy_step,
    replace_automatic_optimization,
)

ClearGradients = Callable[[], None]


class ScheduledClosure(Closure):
    """Closure that runs all microbatches by the strategy, and clears old gradients in between."""

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._step_fn()


class ScheduledOptimization(AutomaticOptimization):
    """Automatic optimization whose forward and backward passes run in ``training_step``.

    Args:
        trainer: Trainer of the fit.
        prepare: Function called before each ``training_step`` of the strategy. Its argument is a
            function that clears the gradients of the previous step, or None while gradients
            accumulate.
    """

    def __init__(self, trainer: Trainer, prepare: Callable[[ClearGradients | None], None]) -> None:
        super().__init__(trainer)
        self.prepare = prepare

    @override
    def _make_closure(self, kwargs: OrderedDict, optimizer: Optimizer, batch_idx: int) -> Closure:
        clear = self._make_zero_grad_fn(batch_idx, optimizer)
        return ScheduledClosure(partial(self._scheduled_step, kwargs, clear))

    def _scheduled_step(self, kwargs: OrderedDict, clear: ClearGradients | None) -> ClosureResult:
        self.prepare(clear)
        output = call_strategy_step(self.trainer, tuple(kwargs.values()))
        # The strategy has divided by the number of accumulated batches already.
        return ClosureResult.from_training_step_output(output)


def install_scheduled_loop(
    trainer: Trainer, prepare: Callable[[ClearGradients | None], None]
) -> None:
    """Replace the trainer's automatic optimization once, and keep its counters.

    Args:
        trainer: Trainer of the fit.
        prepare: Function described at :class:`ScheduledOptimization`. A later call replaces it.
    """
    loop = automatic_optimization(trainer)
    if isinstance(loop, ScheduledOptimization):
        loop.prepare = prepare
    else:
        replace_automatic_optimization(trainer, ScheduledOptimization(trainer, prepare))
