"""Preference pairs that are read as a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_megatron.data.packing import pack_once
from lightning_megatron.data.preference_samples import PairRows, one_row_each
from lightning_megatron.data.row_tokens import RowTokens
from lightning_megatron.data.streamed_samples import StreamedSamples


class StreamedPairs(StreamedSamples[PairRows]):
    """Preference pairs of a stream.

    Args:
        options: Arguments of ``StreamedSamples`` except ``max_documents``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(max_documents=PairRows.max_documents, **options)

    def pair(self, index: int) -> int:
        """Return the number of the pair of a sample, which is that of its row in the files.

        Args:
            index: Number of the sample.
        """
        pairs, number = self.in_section(index)
        return pairs.pair(number)

    def text(self, index: int, side: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and a mask of those that belong to answers.

        Args:
            index: Number of the sample.
            side: 0 for the chosen conversation, 1 for the rejected one.
        """
        pairs, number = self.in_section(index)
        return pairs.text(number, side)

    @override
    def _samples_of(self, rows: RowTokens, random: np.random.RandomState | None) -> PairRows:
        lengths = one_row_each(len(rows.numbers))
        return PairRows(rows, pack_once(lengths, 1, random, False, 1, None))
