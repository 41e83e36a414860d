"""Rows of whole texts with a mask of answers: read from memory, or as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_megatron.data.index_cache import cache_key
from lightning_megatron.data.packing import PackedIndex, index_packed, pack_once
from lightning_megatron.data.row_tokens import RowTokens
from lightning_megatron.data.streamed_samples import StreamedSamples


class TextRows:
    """Rows of whole texts, such as conversations or documents.

    Args:
        index: Texts of each row.
    """

    def __init__(self, texts: RowTokens, index: PackedIndex) -> None:
        self._texts = texts
        self._index = index

    def __len__(self) -> int:
        return self._index.num_windows

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self._values_of_row(self._texts.tokens, index).astype(np.int64)

    @property
    def max_documents(self) -> int:
        """Largest number of texts in a row."""
        return self._index.max_pieces

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each text in a row, in order."""
        return [stop - start for start, stop in self._index.pieces(index, self._texts.bounds)]

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens of a row that belong to answers."""
        return self._values_of_row(self._texts.is_answer, index).astype(np.bool_)

    def _values_of_row(self, values: npt.NDArray, index: int) -> npt.NDArray:
        pieces = self._index.pieces(index, self._texts.bounds)
        return np.concatenate([values[start:stop] for start, stop in pieces])


class TextSamples(TextRows):
    """Rows of the texts of some files, in shuffled order.

    Args:
        encoded: Encoded texts of the files.
        seq_length: Tokens that a row predicts (tokens).
        seed: Seed of the shuffle; None keeps the order of the files.
        is_packed: Whether rows have several texts; otherwise each row has one.
        num_samples: Number of rows, over as many passes as needed; None makes one pass (samples).
    """

    def __init__(
        self,
        encoded: RowTokens,
        seq_length: int,
        seed: int | None,
        is_packed: bool = True,
        num_samples: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        lengths = np.diff(encoded.bounds)
        super().__init__(encoded, index_packed(lengths, seq_length, num_samples, seed, is_packed))
        # The names of earlier versions, so that their checkpoints match.
        self.order_key = cache_key(
            {
                "conversations": encoded.key,
                "seed": seed,
                "is_packed": is_packed,
                "is_pass": num_samples is None,
            }
        )


class StreamedTexts(StreamedSamples[TextRows]):
    """Packed rows of a stream of texts, such as conversations or documents.

    Args:
        is_packed: Whether rows have several texts; otherwise each row has one.
        max_pieces: Largest number of texts in a packed row.
        options: Further arguments of ``StreamedSamples``.
    """

    def __init__(
        self, *, is_packed: bool, max_pieces: int, key: Mapping[str, Any], **options: Any
    ) -> None:
        # The names of earlier versions, so that their checkpoints match.
        packing = {"num_windows": int(is_packed), "max_pieces": max_pieces}
        super().__init__(key={**key, **packing}, **options)
        #: Largest number of texts in a row.
        self.max_documents = max_pieces if is_packed else 1
        self._is_packed = is_packed

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        rows, number = self.in_section(index)
        return rows[number]

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each text of a row, in order."""
        rows, number = self.in_section(index)
        return rows.lengths(number)

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens of a row that belong to answers."""
        rows, number = self.in_section(index)
        return rows.is_answer(number)

    @override
    def samples_of(self, rows: RowTokens, random: np.random.RandomState | None) -> TextRows:
        lengths = np.diff(rows.bounds)
        index = pack_once(lengths, self.seq_length, random, self._is_packed, self.max_documents)
        return TextRows(rows, index)
