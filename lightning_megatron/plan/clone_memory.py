"""Byte layout of the memories for the weights of clones, and for their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

#: Alignment of every stack (bytes): more than tensor maps and the widest accesses need.
_ALIGNMENT = 128


@dataclass(frozen=True)
class CloneMemory:
    """Layout of one stack over a rank's places for every matrix of an expert.

    Args:
        places: Number of places on every rank (places).
        shapes: Shape of each matrix of an expert.
        element: Size of an element (bytes).
    """

    places: int
    shapes: tuple[tuple[int, int], ...]
    element: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the offset of every stack (bytes)."""
        return self._ends[:-1]

    @property
    def num_bytes(self) -> int:
        """Return the size of the memory (bytes)."""
        return self._ends[-1]

    @property
    def _ends(self) -> tuple[int, ...]:
        sizes = [self.places * prod(shape) * self.element for shape in self.shapes]
        return (0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
