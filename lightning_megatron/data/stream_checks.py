"""Checks of data modules and Trainers that read their training data as a stream."""

from __future__ import annotations

from typing import Any

from lightning_megatron.errors import UnsupportedError


def check_no_sample_number(train_samples: int | None) -> None:
    """Check that a stream has no number of samples.

    Args:
        train_samples: Number of training samples that the user gave (samples).

    Raises:
        UnsupportedError: If a number is given.
    """
    if train_samples is not None:
        raise UnsupportedError(
            f"train_samples ({train_samples}) cannot be used with streaming, because the "
            "number of samples of a stream is unknown. Use max_steps of the Trainer, and "
            "limit_train_batches for shorter epochs."
        )


def check_stream_trainer(trainer: Any) -> None:
    """Check that a Trainer ends, and does not repeat batches of a stream.

    Args:
        trainer: The Trainer; None without a Trainer.

    Raises:
        UnsupportedError: If the Trainer has no limit of steps, epochs or time, or uses
            ``overfit_batches``.
    """
    if trainer is None:
        return
    # `max_time` adds Lightning's Timer, which has this method.
    has_timer = any(hasattr(callback, "time_remaining") for callback in trainer.callbacks)
    if trainer.max_steps == -1 and trainer.max_epochs == -1 and not has_timer:
        raise UnsupportedError(
            "streaming needs max_steps, max_epochs or max_time of the Trainer, because a stream "
            "repeats its files endlessly: none is given. Use max_steps for a number of optimizer "
            "steps, or max_epochs for a number of passes."
        )
    if trainer.overfit_batches:
        raise UnsupportedError(
            f"overfit_batches ({trainer.overfit_batches}) cannot be used with streaming, because "
            "the batches of a stream differ in each epoch. Leave streaming out, or use a smaller "
            "file."
        )
