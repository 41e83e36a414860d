"""Private names of Lightning's loops (optimization, logging steps, hooks and ends of epochs) and of
a LightningModule, and the test for overridden hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import Closure as Closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.optimization.automatic import (
    _AutomaticOptimization as AutomaticOptimization,
)
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.tuner.lr_finder import _LRCallback as LRSearch
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

_Callback = TypeVar("_Callback", bound=Callback)
#: Function that clears the gradients of the previous step.
ClearGradients = Callable[[], None]


def automatic_optimization(trainer: Trainer) -> AutomaticOptimization:
    """Return the loop that runs the closure and the optimizer."""
    return trainer.fit_loop.epoch_loop.automatic_optimization


class ScheduledClosure(Closure):
    """Closure that runs all microbatches by the strategy, and clears old gradients in between."""

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._step_fn()


class ScheduledOptimization(AutomaticOptimization):
    """Automatic optimization whose forward and backward passes run in ``training_step``.

    Args:
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
        # Under the profiler, with the hook's name for logging.
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        # The strategy has divided by the number of accumulated batches already.
        return ClosureResult.from_training_step_output(output)


def install_scheduled_loop(
    trainer: Trainer, prepare: Callable[[ClearGradients | None], None]
) -> None:
    """Replace the trainer's automatic optimization once, and keep its counters.

    Args:
        prepare: Function described at :class:`ScheduledOptimization`. A later call replaces it.
    """
    loop = automatic_optimization(trainer)
    if isinstance(loop, ScheduledOptimization):
        loop.prepare = prepare
    else:
        scheduled = ScheduledOptimization(trainer, prepare)
        scheduled.optim_progress = loop.optim_progress
        scheduled._skip_backward = loop._skip_backward
        trainer.fit_loop.epoch_loop.automatic_optimization = scheduled


def skips_backward(trainer: Trainer) -> bool:
    """Return whether stochastic weight averaging runs this pass without gradients."""
    return bool(trainer.fit_loop._skip_backward)


def accumulates(trainer: Trainer) -> bool:
    """Return whether the optimizer steps at a later batch."""
    return bool(trainer.fit_loop._should_accumulate())


def logged_step(trainer: Trainer) -> int:
    """Return the step number under which Lightning logs this batch."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def may_accumulate(trainer: Trainer) -> bool:
    """Return whether gradients of several batches accumulate, now or in a later epoch."""
    is_scheduled = bool(callbacks_of(trainer, GradientAccumulationScheduler))
    return is_scheduled or trainer.accumulate_grad_batches > 1


def is_logged(trainer: Trainer) -> bool:
    """Return whether loggers receive the values of this batch; the same on all ranks."""
    # Lightning's own condition also depends on should_stop, which one rank may set earlier than
    # another.
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (logged_step(trainer) + 1) % every == 0


def log_step_values(trainer: Trainer, module: LightningModule, values: dict[str, Tensor]) -> None:
    """Log scalars of a step as ``log_dict(values, on_step=True, on_epoch=False)`` does, faster.

    ``log`` moves all tensors of a metric to the device of each new value, which takes half a
    millisecond for each of them while the device may have nothing to do. A metric that has been
    logged before in the epoch takes the value as it is.
    """
    results = trainer._results
    is_first_batch = trainer._logger_connector._first_loop_iter is not False
    for name, value in values.items():
        key = f"{module._current_fx_name}.{name}"
        if results is None or is_first_batch or key not in results:
            module.log(name, value, on_step=True, on_epoch=False)
        else:
            results.update_metrics(key, value, batch_size=1)


def searches_learning_rate(trainer: Trainer) -> bool:
    """Return whether this fit is one of the Tuner's, in which losses are expected to explode."""
    return bool(callbacks_of(trainer, LRSearch))


def total_batch_index(trainer: Trainer) -> int:
    """Return the number of training batches before this one, over all epochs (batches)."""
    return int(trainer.fit_loop.epoch_loop.total_batch_idx)


def batch_of(error: BaseException, trainer: Trainer) -> Any:
    """Return the training batch in whose step an error was raised; None outside of such steps."""
    code = type(trainer.fit_loop.epoch_loop).advance.__code__
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is code:
            return frame.f_locals.get("batch")
    return None


def call_after_backward_hooks(trainer: Trainer) -> None:
    """Call ``on_after_backward`` of callbacks and module, as Lightning's backward does."""
    call._call_callback_hooks(trainer, "on_after_backward")
    call._call_lightning_module_hook(trainer, "on_after_backward")


def run_backward(trainer: Trainer, loss: Tensor, prepare: Callable[[], None]) -> None:
    """Call ``on_before_backward`` hooks, then the module's ``backward``, as Lightning does.

    Args:
        loss: Loss from which the backward pass starts.
        prepare: Function called between the hooks and the backward pass.
    """
    call._call_callback_hooks(trainer, "on_before_backward", loss)
    call._call_lightning_module_hook(trainer, "on_before_backward", loss)
    prepare()
    with trainer.profiler.profile(f"[Strategy]{type(trainer.strategy).__name__}.backward"):  # type: ignore[attr-defined]
        trainer.lightning_module.backward(loss)


def forward_zero_grad(strategy: Strategy) -> None:
    """Forward ``zero_grad`` of Lightning's optimizer wrappers to the wrapped optimizers.

    A wrapper's own method is that of the optimizer's class, and ignores a method that was replaced
    on the instance.
    """
    for wrapper in strategy._lightning_optimizers:
        wrapper.zero_grad = partial(_zero_grad_of, wrapper._optimizer)  # type: ignore[attr-defined]


def _zero_grad_of(optimizer: Optimizer, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none)


def callbacks_of(trainer: Trainer, kind: type[_Callback]) -> list[_Callback]:
    """Return the Trainer's callbacks of a class."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def replace_method(undo: ExitStack, owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace a method of one object until ``undo`` is closed."""
    setattr(owner, name, method)
    undo.callback(vars(owner).pop, name, None)


def call_around_epochs(trainer: Trainer, function: Callable[[], None], undo: ExitStack) -> None:
    """Call a function before the hooks and metrics at the start and end of epochs.

    These are the start of an evaluation, and the end of an epoch or dataloader.
    """
    for owner, name in _epoch_points(trainer):
        around = partial(_after, function, getattr(type(owner), name), owner)
        replace_method(undo, owner, name, around)


def _epoch_points(trainer: Trainer) -> list[tuple[Any, str]]:
    evaluations = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    points = ("on_run_start", "_store_dataloader_outputs", "_on_evaluation_epoch_end")
    return [
        (trainer.fit_loop, "on_advance_end"),
        *((loop, name) for loop in evaluations for name in points),
        (trainer.predict_loop, "_on_predict_epoch_end"),
    ]


def _after(function: Callable[[], None], method: Callable[[Any], Any], owner: Any) -> Any:
    function()
    return method(owner)


def publish_device_mesh(module: LightningModule, mesh: Any) -> None:
    """Set ``self.device_mesh`` of a LightningModule to ``mesh``."""
    module._device_mesh = mesh


def attached_trainer(module: LightningModule) -> Trainer | None:
    """Return the Trainer of a LightningModule; None outside of a run, where ``trainer`` raises."""
    return module._trainer
