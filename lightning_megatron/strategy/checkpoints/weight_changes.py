"""Check for code other than optimizer steps that may change checkpointed weights."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_megatron.strategy.private.user_module import is_overridden

#: Hooks that run between a save and the end of the next backward pass.
_HOOKS = tuple(
    """
    on_train_batch_start on_train_batch_end on_train_epoch_start on_train_epoch_end
    on_validation_start on_validation_epoch_start on_validation_batch_start
    on_validation_batch_end on_validation_epoch_end on_validation_end
    on_before_zero_grad optimizer_zero_grad on_after_backward on_before_backward
    """.split()
)
_LIBRARY_PACKAGES = ("lightning_megatron", "lightning")


def only_steps_change_weights(module: LightningModule, trainer: Trainer) -> bool:
    """Return whether only optimizer steps can change weights and optimizer states.

    If so, a GPU may run forward and backward passes while a save still copies weights and states.
    User hooks may change anything, so a hook in between makes the step wait for the copies.

    Args:
        module: Module that is trained.
        trainer: Trainer of the module.
    """
    if not module.automatic_optimization:
        return False
    if not _is_of_library(module) and any(_has_own(module, hook) for hook in _HOOKS):
        return False
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    changing = (StochasticWeightAveraging, WeightAveraging)
    return all(
        _is_of_library(callback) and not isinstance(callback, changing) for callback in callbacks
    )


def _has_own(module: LightningModule, hook: str) -> bool:
    """Return whether a user wrote a hook; a user's subclass may inherit one of this package."""
    return is_overridden(hook, module, LightningModule) and not _is_library_module(
        getattr(getattr(module, hook), "__module__", "")
    )


def _is_of_library(part: object) -> bool:
    return _is_library_module(type(part).__module__)


def _is_library_module(name: str) -> bool:
    return name.partition(".")[0] in _LIBRARY_PACKAGES
