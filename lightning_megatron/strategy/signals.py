"""Let all ranks agree that the job was told to end, without touching the device before every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_megatron.groups.collectives import all_reduce_, barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.private import (
    SIGTERMException,
    announce_sigterm,
    replace_signal_check,
    restore_signal_check,
)


class SignalAgreement:
    """Replace Lightning's check for SIGTERM: it broadcasts from the device and waits for it before every batch.

    A rank that receives SIGTERM notes it; every ``interval`` batches all ranks ask each other on the CPU, and leave the
    fit together at the same batch.

    Args:
        trainer: The trainer that is fitting.
        mesh: The groups of this rank.
        interval: Training batches between two questions (batches).
    """

    def __init__(self, trainer: Trainer, mesh: ParallelMesh, interval: int) -> None:
        self._trainer, self._mesh, self._interval = trainer, mesh, interval
        self._received = False
        self._num_batches = 0

    def install(self) -> None:
        """Take Lightning's place."""
        replace_signal_check(self._trainer, self.check, self.notify)

    def remove(self) -> None:
        """Give Lightning its check back."""
        restore_signal_check(self._trainer)

    def notify(self, signum: Any, *_: Any) -> None:
        """Handle SIGTERM: remember it, and pass it on to the processes that this one launched."""
        if self._received:
            return
        self._received = True
        kill: Callable[[Any], None] | None = getattr(self._trainer.strategy.launcher, "kill", None)
        if kill is not None:
            kill(signum)

    def check(self) -> None:
        """Ask whether any rank was told to end, every so many batches.

        Raises:
            SIGTERMException: On all ranks, if one was.

        Communication: one all-reduce of an integer over the world on the CPU, at every ``interval``-th call.
        """
        self._num_batches += 1
        if self._num_batches % self._interval:
            return
        received = torch.tensor([int(self._received)])
        if all_reduce_(received, self._mesh.world_cpu, "max").item():
            announce_sigterm(self._trainer)
            barrier(self._mesh.world_cpu)
            raise SIGTERMException
