"""Launcher of a rank's collectives, at which a recording can intercept them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor


class Work(Protocol):
    """Handle of a collective in flight, such as ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Wait until the collective is complete, on a GPU with the current stream only."""

    def is_completed(self) -> bool:
        """Return whether the collective is known to be complete, without waiting."""


class CollectiveRecorder(Protocol):
    """Recording of a computation, in which every collective is one entry that can run again."""

    def run(self, collective: Callable[[], object], written: Sequence[Tensor]) -> None:
        """Run a collective that is complete when it returns, and record it.

        Args:
            collective: The collective; it can be run again on the same tensors.
            written: Tensors that it writes.
        """

    def start(self, collective: Callable[[], Work], written: Sequence[Tensor]) -> Work:
        """Start an asynchronous collective, and record its start; the handle records the wait.

        Args:
            collective: Start of the collective; it can be called again on the same tensors.
            written: Tensors that it writes.
        """


class CollectiveLauncher:
    """Launcher of all collectives of tensors on one rank.

    Without a recorder, the launcher only starts them. A recorder sees each collective as one entry,
    without the operations of the backend inside it, such as copies between tensors. Collectives of
    Python objects and barriers do not use the launcher, because they run on the host.
    """

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        #: Recording of the current computation; None outside of recordings.
        self.recorder: CollectiveRecorder | None = None

    def run(self, collective: Callable[[], object], *written: Tensor) -> None:
        """Run a collective that writes some tensors and is complete when it returns.

        On a GPU, the current stream has then waited for the collective, and the host has not.
        """
        if self.recorder is None:
            collective()
        else:
            self.recorder.run(collective, written)

    def start(self, collective: Callable[[], Work], *written: Tensor) -> Work:
        """Start an asynchronous collective that writes some tensors, and return its handle."""
        if self.recorder is None:
            return collective()
        return self.recorder.start(collective, written)
