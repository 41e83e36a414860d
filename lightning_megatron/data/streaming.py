"""Training data that are read as a stream: settings, checks of data modules and Trainers, and
counts of rows and samples with the messages about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lightning_megatron.data.row_tokens import RowTokens
from lightning_megatron.errors import CorruptDataError, UnsupportedError
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


class StreamCounts(NamedTuple):
    """Counts of the rows, tokens and samples of a pass over a stream so far.

    Args:
        num_read: Rows of files that were read (rows).
        num_cut: Rows of files whose end was cut off (rows).
        num_left_out: Rows of files that were too long or too short, and were left out (rows).
        num_tokens: Tokens of the remaining rows (tokens).
        num_answers: Tokens of answers among them (tokens).
        num_samples: Samples that these tokens make: packed rows, or pairs (samples).
    """

    num_read: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_answers: int = 0
    num_samples: int = 0

    def after(self, rows: RowTokens, num_samples: int) -> StreamCounts:
        """Return the counts after one more section.

        Args:
            rows: Rows of the section.
            num_samples: Samples that they make (samples).
        """
        added = (
            rows.num_read,
            rows.num_cut,
            rows.num_left_out,
            int(rows.bounds[-1]),
            int(rows.is_answer.sum()),
            num_samples,
        )
        return StreamCounts(*(count + addend for count, addend in zip(self, added, strict=True)))

    def fill(self, seq_length: int) -> str:
        """Return how many packed rows there are, and how full they are.

        Args:
            seq_length: Tokens that a packed row predicts (tokens).
        """
        full = self.num_tokens / max(self.num_samples * (seq_length + 1), 1)
        return f"in {self.num_samples} rows, which are {full:.1%} full"


class RowMessages(Protocol):
    """Log and error messages about the rows of a stream."""

    def summary(self, counts: StreamCounts, seq_length: int) -> str:
        """Return how many rows were read and left out, and how many samples they make.

        Args:
            seq_length: Tokens that a row predicts (tokens).
        """

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for a pass without any row to train on.

        Args:
            seq_length: Tokens that a row predicts (tokens).
        """


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
