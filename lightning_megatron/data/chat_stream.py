"""Packed rows of conversations or documents that are read as a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_megatron.data.chat_samples import ConversationRows
from lightning_megatron.data.encoded_rows import no_rows_error
from lightning_megatron.data.packing import pack_once
from lightning_megatron.data.row_tokens import RowTokens
from lightning_megatron.data.streamed_samples import StreamedSamples
from lightning_megatron.data.streaming import StreamCounts
from lightning_megatron.errors import CorruptDataError


@dataclass(frozen=True)
class ConversationMessages:
    """Log and error messages about a stream of conversations or pairs of them.

    Args:
        plural: Plural noun for the rows.
        is_packed: Whether samples are packed rows, so that messages say how full they are.
    """

    plural: str
    is_packed: bool = True

    def summary(self, counts: StreamCounts, seq_length: int) -> str:
        """Return how many rows were read, cut and left out."""
        line = (
            f"{counts.num_read} {self.plural} read, {counts.num_cut} cut after {seq_length + 1} "
            f"tokens (seq_length + 1), {counts.num_left_out} left out as too long; "
            f"{counts.num_tokens} tokens, {counts.num_answers} of them in answers"
        )
        return f"{line}, {counts.fill(seq_length)}" if self.is_packed else line

    def empty_error(self, names: str, counts: StreamCounts, seq_length: int) -> CorruptDataError:
        """Return the error for files whose rows are all too long."""
        return no_rows_error(self.plural, names, seq_length, counts.num_read, counts.num_left_out)


class StreamedConversations(StreamedSamples[ConversationRows]):
    """Packed rows of a stream of conversations or documents.

    Args:
        num_windows: Windows of a packed row; 0 puts one conversation or document into each row.
        max_pieces: Largest number of conversations or documents, and gaps, in a packed row.
        options: Arguments of ``StreamedSamples`` except ``max_documents``.
    """

    def __init__(self, *, num_windows: int, max_pieces: int, **options: Any) -> None:
        super().__init__(max_documents=max_pieces if num_windows else 1, **options)
        self._num_windows = num_windows

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens of a row that belong to answers."""
        rows, number = self.in_section(index)
        return rows.is_answer(number)

    @override
    def _samples_of(
        self, rows: RowTokens, random: np.random.RandomState | None
    ) -> ConversationRows:
        index = pack_once(
            np.diff(rows.bounds),
            self.seq_length,
            random,
            self._num_windows > 0,
            max(self._num_windows, 1),
            self.max_documents,
        )
        return ConversationRows(rows, index)
