"""Interfaces through which other code observes the actions and backward passes of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.schedule import Schedule


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


class ActionObserver(Protocol):
    """Observer of a step's actions on this rank."""

    def begin_step(self, schedule: Schedule) -> None:
        """Prepare for the actions of a step.

        Args:
            schedule: Schedule of the step.
        """

    def during(self, action: Action) -> AbstractContextManager[None]:
        """Return the context manager in which an action runs."""

    def record_sends(self, unit: PipelineUnit, transfers: PendingTransfers) -> None:
        """Record transfers that read an output or an input gradient of a unit.

        The memory of these tensors must not be reused before the transfers complete.
        """
