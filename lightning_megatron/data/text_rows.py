"""Rows of whole texts with a mask of answers: read from memory, or as a stream."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_megatron.data.packing import PackedIndex, pack_once
from lightning_megatron.data.row_tokens import RowTokens
from lightning_megatron.data.samples import NO_TOKEN
from lightning_megatron.data.streamed_samples import StreamedSamples


class Texts(Protocol):
    """Tokens of several texts, such as ``RowTokens``."""

    @property
    def tokens(self) -> npt.NDArray:
        """Token ids."""

    @property
    def is_answer(self) -> npt.NDArray:
        """1 for tokens of answers, 0 for other tokens."""

    @property
    def bounds(self) -> npt.NDArray:
        """Index of the first token of each text, and the total number of tokens."""


class TextRows:
    """Rows of whole texts, such as conversations or documents.

    Args:
        index: Texts of each row.
    """

    def __init__(self, texts: Texts, index: PackedIndex) -> None:
        self._texts = texts
        self._index = index

    def __len__(self) -> int:
        return self._index.num_windows

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self._values_of_row(self._texts.tokens, index, NO_TOKEN).astype(np.int64)

    @property
    def max_documents(self) -> int:
        """Largest number of texts and gaps in a row."""
        return self._index.max_pieces

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each text and gap in a row, in order."""
        return [stop - start for start, stop in self._index.pieces(index, self._texts.bounds)]

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens of a row that belong to answers."""
        return self._values_of_row(self._texts.is_answer, index, 0).astype(np.bool_)

    def _values_of_row(self, values: npt.NDArray, index: int, gap_value: int) -> npt.NDArray:
        parts = [
            values[start:stop] if start >= 0 else np.full(-start, gap_value, np.int64)
            for start, stop in self._index.pieces(index, self._texts.bounds)
        ]
        return np.concatenate(parts)


class StreamedTexts(StreamedSamples[TextRows]):
    """Packed rows of a stream of texts, such as conversations or documents.

    Args:
        num_windows: Windows of a packed row; 0 puts one text into each row.
        max_pieces: Largest number of texts and gaps in a packed row.
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
    def _samples_of(self, rows: RowTokens, random: np.random.RandomState | None) -> TextRows:
        index = pack_once(
            np.diff(rows.bounds),
            self.seq_length,
            random,
            self._num_windows > 0,
            max(self._num_windows, 1),
            self.max_documents,
        )
        return TextRows(rows, index)
