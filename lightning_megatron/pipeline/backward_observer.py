"""Interface between the executor and what sums gradients over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lightning_megatron.layers.gradient_slot import GradientSlot


class BackwardObserver(Protocol):
    """Interface that is notified of the last backward pass of each chunk in a step."""

    def begin_last_backward(self, chunk: int) -> None:
        """Prepare for the last backward pass of ``chunk`` in this step, which runs next."""

    def begin_last_weight_half(self, chunk: int, left: Mapping[GradientSlot, int]) -> None:
        """Prepare for the last weight half of ``chunk``, if its backward passes run in halves.

        Args:
            chunk: Chunk whose input halves have all run, and whose last weight half runs next.
            left: Number of gradients that it will add to each slot. All others are complete.
        """

    def start_reduction(self, chunk: int) -> None:
        """Start the reduction of the gradients of ``chunk``, which are now complete."""
