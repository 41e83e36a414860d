"""Interface through which CUDA graphs and other code observe the actions of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from lightning_megatron.groups.p2p import PendingTransfers
from lightning_megatron.plan.actions import Action, PipelineUnit
from lightning_megatron.plan.schedule import Schedule


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
