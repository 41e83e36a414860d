"""Who might read parameters between an optimizer step and the next forward pass, or gradients after a backward pass."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.strategy.private import is_overridden

#: Hooks that run between a step and the next forward pass in which the strategy itself does not wait.
_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_model_eval"),
    *("on_before_batch_transfer", "on_after_batch_transfer"),
)
#: Hooks in which others look at gradients.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
#: Callbacks that look at counters, logged values and clocks, or save through the strategy.
_HARMLESS = ("lightning_megatron.", "lightning.pytorch.callbacks.progress")
_HARMLESS_NAMES = frozenset(
    {
        *("ModelCheckpoint", "OnExceptionCheckpoint", "EarlyStopping", "LearningRateMonitor", "Timer", "ModelSummary"),
        *("RichModelSummary", "DeviceStatsMonitor", "GradientAccumulationScheduler", "ThroughputMonitor"),
    }
)


def parameter_reader(trainer: Trainer) -> str | None:
    """Name a hook that might read the model's parameters after a step; None if there is none.

    Hooks of the module and of callbacks that are not known to leave parameters alone count, whatever they do.
    """
    return _first_overridden(trainer, _HOOKS)


def gradient_reader(trainer: Trainer) -> str | None:
    """Name a hook that might look at ``parameter.grad``, which is None here; None if there is none."""
    return _first_overridden(trainer, _GRADIENT_HOOKS)


def _first_overridden(trainer: Trainer, hooks: tuple[str, ...]) -> str | None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if _is_harmless(type(callback)):
            continue
        for hook in hooks:
            if getattr(type(callback), hook, None) is not getattr(Callback, hook, None):
                return f"{type(callback).__name__}.{hook}"
    module = trainer.lightning_module
    for hook in hooks:
        if hasattr(LightningModule, hook) and hook != "on_validation_model_eval" and is_overridden(hook, module):
            return f"{type(module).__name__}.{hook}"
    return None


def _is_harmless(kind: type) -> bool:
    home = kind.__module__
    return home.startswith(_HARMLESS) or (home.startswith("lightning.") and kind.__name__ in _HARMLESS_NAMES)
