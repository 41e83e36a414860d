"""Where tokens of all ranks lie in memory that every rank has alike, and others write into."""

from __future__ import annotations

from dataclasses import dataclass

#: Rows begin where the widest load of a GPU may begin (bytes).
_ALIGNMENT = 16
#: The number of an expert is an int64 (bytes).
_NUMBER = 8


@dataclass(frozen=True, kw_only=True)
class TokenSlots:
    """Lay out a slot for every token of every rank: its features, the probabilities of its choices, and the choices.

    Slot ``rank * num_tokens + t`` is of token t of a rank. First there are the features of all slots, then the
    probabilities of all, then the choices of all.

    Args:
        num_ranks: Ranks that have tokens (ranks).
        num_tokens: Tokens of each of them (tokens).
        width: Features of a token (elements).
        top_k: Choices of a token (experts).
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
        """Count the slots."""
        return self.num_ranks * self.num_tokens

    @property
    def scales_at(self) -> int:
        """Return where the probabilities begin (bytes)."""
        return _aligned(self.count * self.width * self.element)

    @property
    def choices_at(self) -> int:
        """Return where the choices begin (bytes)."""
        return self.scales_at + _aligned(self.count * self.top_k * self.scale)

    @property
    def num_bytes(self) -> int:
        """Return the size of the memory (bytes)."""
        return self.choices_at + self.count * self.top_k * _NUMBER


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
