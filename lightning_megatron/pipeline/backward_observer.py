"""Interface between the executor and the code that reduces gradients over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol


class BackwardObserver(Protocol):
    """Observer of the last backward pass of each chunk in a step."""

    def begin_last_backward(self, chunk: int) -> None:
        """Prepare for the last backward pass of ``chunk`` in this step; it is the next action."""

    def begin_last_weight_half(self, chunk: int, left: Mapping[Hashable, int]) -> None:
        """Prepare for the last weight half of ``chunk``, if its backward passes run in halves.

        Args:
            chunk: Chunk whose input halves have all run, and whose last weight half runs next.
            left: Number of gradients that this weight half will add to each gradient slot. All
                other slots are complete.
        """

    def start_reduction(self, chunk: int) -> None:
        """Start the reduction of the gradients of ``chunk``, which are now complete."""
