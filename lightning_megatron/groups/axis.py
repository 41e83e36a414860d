"""Axis of the mesh: one group of ranks, from the view of one of them; and the launcher of its
collectives, at which a recording can intercept them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.peer_memory import PeerMemory

_Result = TypeVar("_Result")


class Work(Protocol):
    """Handle of a collective in flight, such as ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Wait until the collective is complete, on a GPU with the current stream only."""

    def is_completed(self) -> bool:
        """Return whether the collective is known to be complete, without waiting."""


class CollectiveRecorder(Protocol):
    """Recording of a computation, in which every collective is one entry that can run again."""

    def run(self, collective: Callable[[], object], written: Sequence[Tensor]) -> None:
        """Run a collective that is complete when it returns, and record it."""

    def start(self, collective: Callable[[], Work], written: Sequence[Tensor]) -> Work:
        """Start an asynchronous collective, and record its start; the handle records the wait."""


class CollectiveLauncher:
    """Launcher of all collectives of tensors on one rank.

    Without a recorder, the launcher only starts them. A recorder sees each collective as one entry,
    without the operations of the backend inside it, such as copies between tensors. Collectives of
    Python objects and barriers are not recorded, because they run on the host.

    Everything that waits for other ranks does so inside of the contexts of those who measure it.
    """

    __slots__ = ("around_waits", "recorder")

    def __init__(self) -> None:
        #: Recording of the current computation; None outside of recordings.
        self.recorder: CollectiveRecorder | None = None
        #: Functions that return a context for each wait, of those who measure waits now.
        self.around_waits: list[Callable[[], AbstractContextManager[None]]] = []

    def run(self, collective: Callable[[], object], *written: Tensor) -> None:
        """Run a collective that writes some tensors and is complete when it returns.

        On a GPU, the current stream has then waited for the collective, and the host has not.
        """
        if self.recorder is None:
            self.wait(collective)
        else:
            self.recorder.run(collective, written)

    def start(self, collective: Callable[[], Work], *written: Tensor) -> Work:
        """Start an asynchronous collective that writes some tensors."""
        if self.recorder is not None:
            return self.recorder.start(collective, written)
        work = collective()
        return _TimedWork(work, self) if self.around_waits else work

    def wait(self, function: Callable[[], _Result]) -> _Result:
        """Call a function that waits for other ranks, inside of the contexts for waits."""
        # A compiled graph must not depend on whether this step is measured.
        if torch.compiler.is_compiling() or not self.around_waits:
            return function()
        with ExitStack() as stack:
            for around in self.around_waits:
                stack.enter_context(around())
            return function()


class _TimedWork:
    """Handle of a collective whose wait is measured."""

    def __init__(self, work: Work, launcher: CollectiveLauncher) -> None:
        self._work = work
        self._launcher = launcher

    def wait(self) -> None:
        self._launcher.wait(self._work.wait)

    def is_completed(self) -> bool:
        return self._work.is_completed()


@dataclass(frozen=True)
class MeshAxis:
    """Group of ranks that differ from this rank only on one axis, or only on a set of axes.

    Args:
        ranks: Global ranks of the group, in axis order.
        rank: Position of this rank in ``ranks``.
        group: Process group; None for a group of one rank, which never communicates.
        overlaps_matmul: Whether matrix products on GPUs are cut into pieces that overlap with their
            communication.
        peer_memory: Symmetric memory that the ranks of the group write into.
        lines: Axes of this rank's row and column, if many ranks form a rectangle. Collectives on
            the CPU run over both, one after the other: gloo passes sums and objects around a ring,
            which takes about 2 sqrt(n) steps instead of n.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    group: ProcessGroup | None = field(default=None, compare=False)
    journal: Journal = field(default_factory=Journal, compare=False, repr=False)
    launcher: CollectiveLauncher = field(
        default_factory=CollectiveLauncher, compare=False, repr=False
    )
    overlaps_matmul: bool = False
    peer_memory: PeerMemory = field(default_factory=PeerMemory, compare=False, repr=False)
    lines: tuple[MeshAxis, ...] = field(default=(), compare=False, repr=False)

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first one of the group."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether this rank is the last one of the group."""
        return self.rank == self.size - 1

    def note(self, kind: str) -> tuple[str, str, int, tuple[int, ...]]:
        """Record in the journal that this rank starts a collective next."""
        # A compiled graph that reads the number would be compiled again at every call.
        if torch.compiler.is_compiling():
            return kind, self.name, 0, self.ranks
        return self.journal.note(kind, self.name, self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAxis:
        """Return the axis itself: a copied module uses the same groups."""
        return self
