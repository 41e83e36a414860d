"""Training data that are read as a stream: settings, and checks of data modules and Trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.settings import Count, coerce_fields

#: Default of ``max_conversations``: one for each this many tokens of a row, and the minimum.
_TOKENS_PER_CONVERSATION = 32
_MIN_CONVERSATIONS = 16


@dataclass(frozen=True)
class Streaming:
    """Settings to read the training files as a stream, with one section in memory at a time.

    A section consists of the next ``shuffle_buffer`` conversations or documents, which are shuffled
    and packed separately from other sections. If the data are a single file that fits into one
    section, the order equals that without streaming.

    Args:
        shuffle_buffer: Number of conversations or documents of a section. A process keeps one
            section in memory, and with ``num_workers`` also the next one.
        shuffle: Whether each pass shuffles the files, and each section its conversations and rows;
            otherwise all keep their order.
        max_conversations: Largest number of conversations in a packed row. The lengths of all
            batches have this size. None means one for each 32 tokens of a row, and at least 16.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    shuffle_buffer: Count = 10_000
    shuffle: bool = True
    max_conversations: Count | None = None

    def __post_init__(self) -> None:
        coerce_fields(self, "streaming.")

    def max_pieces(self, seq_length: int) -> int:
        """Return the largest number of conversations in a packed row.

        Args:
            seq_length: Tokens that a row predicts (tokens).
        """
        if self.max_conversations is None:
            return max(_MIN_CONVERSATIONS, seq_length // _TOKENS_PER_CONVERSATION)
        return self.max_conversations


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
