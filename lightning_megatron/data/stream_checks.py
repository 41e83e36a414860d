"""What a data module and a Trainer must allow for training data that are read as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.data.streaming import Streaming
from lightning_megatron.errors import UnsupportedError


def check_stream_settings(streaming: Streaming, given: Mapping[str, Any]) -> None:
    """Refuse settings of a data module that a stream cannot honour.

    Args:
        streaming: Settings of the stream.
        given: Other settings by name.

    Raises:
        UnsupportedError: If one needs the number of samples.
        ParallelPlanError: If rows cannot have enough conversations.
    """
    if given.get("train_samples") is not None:
        raise UnsupportedError(
            f"train_samples ({given['train_samples']}) cannot be used with streaming: a stream has "
            "no samples to choose from. Use max_steps of the Trainer, and limit_train_batches for "
            "shorter epochs."
        )
    streaming.most_pieces(given["seq_length"], given["context_windows"])


def check_stream_trainer(trainer: Any) -> None:
    """Refuse a Trainer that would train on a stream without end, or on some of its batches again.

    Args:
        trainer: The Trainer; None without one.

    Raises:
        UnsupportedError: If it does.
    """
    if trainer is None:
        return
    # Lightning's Timer, which `max_time` adds
    has_timer = any(hasattr(one, "time_remaining") for one in trainer.callbacks)
    if trainer.max_steps == -1 and trainer.max_epochs == -1 and not has_timer:
        raise UnsupportedError(
            "a Trainer of a stream needs max_steps, max_epochs or max_time: none is given, and "
            "the stream begins its files again without end. Use max_steps for a number of "
            "optimizer steps, or max_epochs for a number of passes."
        )
    if trainer.overfit_batches:
        raise UnsupportedError(
            f"overfit_batches ({trainer.overfit_batches}) cannot be used with streaming, which "
            "trains on other batches in each epoch. Leave streaming out, or use a small file."
        )
