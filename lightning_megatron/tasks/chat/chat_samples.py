"""Rows of whole conversations, packed by best fit, and batches whose labels are answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lightning_megatron.building_blocks import (
    IGNORED,
    EncodedRows,
    Samples,
    TextRows,
    WindowBatches,
    cache_key,
    index_packed,
)


class ConversationSamples(Samples, Protocol):
    """Rows of conversations with a mask of the tokens of answers."""

    def is_answer(self, index: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens of a row that belong to answers."""


class ChatSamples(TextRows):
    """Rows of the conversations of some files, in shuffled order.

    Args:
        seq_length: Tokens that a row predicts (tokens).
        seed: Seed of the shuffle; None keeps the order of the files.
        num_windows: Windows of a packed row, see ``data.packing.index_packed``; 0 puts one
            conversation into each row.
        num_samples: Number of rows, over as many passes as needed; None makes one pass (samples).
    """

    def __init__(
        self,
        encoded: EncodedRows,
        seq_length: int,
        seed: int | None,
        num_windows: int,
        num_samples: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        lengths = np.diff(encoded.bounds)
        is_packed = num_windows > 0
        index = index_packed(lengths, seq_length, num_samples, seed, is_packed, max(1, num_windows))
        super().__init__(encoded, index)
        self.order_key = cache_key(
            {
                "conversations": encoded.key,
                "seed": seed,
                "is_packed": is_packed,
                "is_pass": num_samples is None,
                **({"context_windows": num_windows} if num_windows > 1 else {}),
            }
        )


class ChatBatches(WindowBatches):
    """Batches of conversations whose labels are the tokens of answers.

    Shapes:
        As for :class:`WindowBatches`. Labels are -100 where the next token does not belong to an
        answer. Batches with lengths also have {"position_ids": (B, S)}, the position of each token
        in its conversation, which Hugging Face models take.

    Args:
        are_separate: Whether batches have the lengths of the conversations.
    """

    def __init__(self, samples: ConversationSamples, are_separate: bool) -> None:
        super().__init__(samples, are_separate=are_separate)
        self._chat_samples = samples

    @override
    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        batch = super().__getitem__(numbers)
        for row, number in enumerate(numbers):
            if number >= 0:
                is_label = torch.from_numpy(self._chat_samples.is_answer(number)[1:])
                batch["labels"][row, : len(is_label)][~is_label] = IGNORED
        if self.are_separate:
            length = batch["tokens"].shape[1]
            rows = [_positions(sizes, length) for sizes in batch["lengths"].tolist()]
            batch["position_ids"] = torch.from_numpy(np.stack(rows))
        return batch


def _positions(sizes: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """Return the position of each token of a row in its conversation or in the padding."""
    return np.concatenate([np.arange(size) for size in (*sizes, length - sum(sizes))])
