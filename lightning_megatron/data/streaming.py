"""Settings of training data that are read as a stream."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
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
        max_conversations: Largest number of conversations, and gaps of ``context_windows``, in a
            packed row. The lengths of all batches have this size. None means one for each 32 tokens
            of a row, and at least 16.

    Raises:
        ParallelPlanError: If a value has a wrong type or is out of range.
    """

    shuffle_buffer: Count = 10_000
    shuffle: bool = True
    max_conversations: Count | None = None

    def __post_init__(self) -> None:
        coerce_fields(self, "streaming.")

    def max_pieces(self, seq_length: int, num_windows: int) -> int:
        """Return the largest number of conversations and gaps in a packed row.

        Args:
            seq_length: Tokens that a row predicts (tokens).
            num_windows: Windows of a row.

        Raises:
            ParallelPlanError: If ``max_conversations`` is below two for each window.
        """
        minimum = 2 * num_windows if num_windows > 1 else 1
        if self.max_conversations is None:
            return max(_MIN_CONVERSATIONS, minimum, seq_length // _TOKENS_PER_CONVERSATION)
        if self.max_conversations < minimum:
            raise ParallelPlanError(
                f"streaming.max_conversations must be at least 2 * context_windows ({minimum}), "
                "because each window may have a conversation and a gap: it is "
                f"{self.max_conversations}. Use {minimum} or more, or leave it out."
            )
        return self.max_conversations
