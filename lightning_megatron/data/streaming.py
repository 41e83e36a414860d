"""Settings of training data that are read as a stream."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import Count, coerce_fields

#: Mean length of conversations below which packed rows are not filled by default (tokens).
_SHORT = 32
_LEAST = 16


@dataclass(frozen=True)
class Streaming:
    """Training files as a stream, in whose memory only a section of them is at a time.

    A section consists of the next ``shuffle_buffer`` conversations or documents, which are shuffled
    and packed by themselves. If a file that has no others fits into one section, the order equals
    the one without streaming.

    Args:
        shuffle_buffer: Conversations or documents of a section, which a process keeps in memory;
            with ``num_workers`` those of the next section, too.
        shuffle: Whether each pass shuffles the order of the files, and each section its
            conversations and rows; otherwise both keep their order.
        most_conversations: Largest number of conversations, and gaps of ``context_windows``, of a
            packed row; all batches have lengths of as many. None means one for each 32 tokens of a
            row, and at least 16.

    Raises:
        ParallelPlanError: If a value has another type or is out of its range.
    """

    shuffle_buffer: Count = 10_000
    shuffle: bool = True
    most_conversations: Count | None = None

    def __post_init__(self) -> None:
        coerce_fields(self, "streaming.")

    def most_pieces(self, seq_length: int, num_windows: int) -> int:
        """Return the largest number of conversations and gaps of a packed row.

        Args:
            seq_length: Tokens that a row predicts (tokens).
            num_windows: Windows of a row.

        Raises:
            ParallelPlanError: If windows cannot have a conversation and a gap each.
        """
        least = 2 * num_windows if num_windows > 1 else 1
        if self.most_conversations is None:
            return max(_LEAST, least, seq_length // _SHORT)
        if self.most_conversations < least:
            raise ParallelPlanError(
                f"streaming.most_conversations must be at least 2 * context_windows ({least}), "
                "because each window may have a conversation and a gap: it is "
                f"{self.most_conversations}. Use {least} or more, or leave it out."
            )
        return self.most_conversations
