"""Counts of the rows and samples of a stream, and messages about them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lightning_megatron.data.row_tokens import RowTokens
from lightning_megatron.errors import CorruptDataError


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
            counts: Counts of a pass.
            seq_length: Tokens that a row predicts (tokens).
        """

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for a pass without any row to train on.

        Args:
            names: Names of the files.
            counts: Counts of the pass.
            seq_length: Tokens that a row predicts (tokens).
        """
