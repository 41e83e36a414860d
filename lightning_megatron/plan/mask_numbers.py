"""Numbers of the elements of an activation in the whole batch, on which dropout masks depend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from lightning_megatron.plan.context import ContextCut


@dataclass(frozen=True)
class PlaceCut:
    """Positions that a rank holds of whole rows, as two pieces of adjacent positions.

    Args:
        offset: Index of the rank's first position within the two pieces (tokens).
        piece: Length of the first piece (tokens).
        early: Position in the whole row at which the first piece starts (tokens).
        late: Position in the whole row at which the second piece starts (tokens).
    """

    offset: int = 0
    piece: int = 2**31 - 1
    early: int = 0
    late: int = 0

    @classmethod
    def of(cls, length: int, sequence: tuple[int, int], context: tuple[int, int]) -> PlaceCut:
        """Return the positions of a rank.

        Args:
            length: Positions that the rank holds (tokens).
            sequence: Rank and number of the ranks of sequence parallelism.
            context: Rank and number of the ranks of context parallelism.
        """
        rank, size = sequence
        context_rank, context_size = context
        if context_size == 1:
            return cls(rank * length)
        if length * size % 2:
            # Rows of odd parts are not cut in two pieces for each rank.
            return cls(rank * length, early=context_rank * length * size)
        cut = ContextCut(context_size, length * size * context_size)
        early, late = cut.ranges(context_rank)
        return cls(rank * length, cut.piece, early.start, late.start)


@dataclass(frozen=True)
class MaskNumbers:
    """Numbers of the rows of an activation, whose last dimension is the features.

    An index of a row in one of the other dimensions is ``row // divisor % size``.

    Args:
        samples: Divisor and size of the dimension of the samples.
        places: Divisor and size of the dimension of the positions; ``(1, 1)`` without one.
        heads: Divisor and size of the dimension of the heads; ``(1, 1)`` without one.
        cut: Positions that this rank holds.
        first_head: Number of this rank's first head in the whole layer (heads).
        first_feature: Number of this rank's first feature in the whole layer (features).
    """

    samples: tuple[int, int] = (1, 1)
    places: tuple[int, int] = (1, 1)
    heads: tuple[int, int] = (1, 1)
    cut: PlaceCut = PlaceCut()
    first_head: int = 0
    first_feature: int = 0

    @cached_property
    def as_integers(self) -> list[int]:
        """Return all numbers, for an operator of torch."""
        cut = self.cut
        return [
            *self.samples,
            *self.places,
            *self.heads,
            cut.offset,
            cut.piece,
            cut.early,
            cut.late,
            self.first_head,
            self.first_feature,
        ]

    @classmethod
    def of_integers(cls, values: Sequence[int]) -> MaskNumbers:
        """Return the numbers that :attr:`as_integers` has listed."""
        samples, places, heads = ((values[start], values[start + 1]) for start in (0, 2, 4))
        return cls(samples, places, heads, PlaceCut(*values[6:10]), values[10], values[11])


def dimension_of_rows(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """Return divisor and size of a dimension, by which a row's index in it follows.

    Args:
        shape: Shape of the activation, features included.
        dim: The dimension, from the start.
    """
    return prod(shape[dim + 1 : -1]), shape[dim]
