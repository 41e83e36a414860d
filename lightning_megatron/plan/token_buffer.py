"""Byte layout of the symmetric buffer that contains every rank's tokens."""

from __future__ import annotations

from dataclasses import dataclass

#: Alignment of the widest load of a GPU (bytes).
_ALIGNMENT = 16
#: Size of an expert index, an int64 (bytes).
_NUMBER = 8


@dataclass(frozen=True, kw_only=True)
class TokenBuffer:
    """Layout of one row for every token of all ranks: features, probabilities, selected experts.

    Row ``rank * num_tokens + t`` belongs to token t of a rank. The buffer contains the features of
    all rows, then the probabilities of all rows, then the selected experts of all rows.

    Args:
        num_ranks: Number of ranks with tokens (ranks).
        num_tokens: Number of tokens of each rank (tokens).
        width: Features of a token (elements).
        top_k: Number of selected experts of a token (experts).
        element: Size of a feature (bytes).
        scale: Size of a probability (bytes).
    """

    num_ranks: int
    num_tokens: int
    width: int
    top_k: int
    element: int
    scale: int

    @property
    def count(self) -> int:
        """Count the rows."""
        return self.num_ranks * self.num_tokens

    @property
    def scales_at(self) -> int:
        """Return the offset of the probabilities (bytes)."""
        return _aligned(self.count * self.width * self.element)

    @property
    def experts_at(self) -> int:
        """Return the offset of the selected experts (bytes)."""
        return self.scales_at + _aligned(self.count * self.top_k * self.scale)

    @property
    def num_bytes(self) -> int:
        """Return the size of the buffer (bytes)."""
        return self.experts_at + self.count * self.top_k * _NUMBER


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
