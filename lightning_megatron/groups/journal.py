"""Record of the collectives that a rank has started, for the comparison of ranks when one hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lightning_megatron.errors import UnsupportedError

#: Number of launches whose parts are stored. A host never runs so many launches ahead of a device.
_MAX_LAUNCHES = 4096
#: Suffix of the names under which exchanges between neighbours on an axis are counted.
NEIGHBOURS = " neighbours"


class DeviceProgress(NamedTuple):
    """Progress of a device through the captured parts that its host has launched.

    ``part`` describes the last part that the device has begun; it is empty if unknown.
    """

    begun: int
    launched: int
    part: str

    def __str__(self) -> str:
        part = f", last {self.part}" if self.part else ""
        return f"the device has begun {self.begun} of {self.launched} captured parts{part}"


class DeviceCounter:
    """Counter on the device that captured parts increment, with a copy that the host can read.

    The host runs ahead of a GPU, and no watchdog sees the collectives of a graph. A captured part
    therefore begins with an addition to the counter and its copy to pinned memory. The host reads
    the copy without waiting for the device, from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._counter = torch.zeros((), dtype=torch.int64, device=device)
            self._copy = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")
        # A numpy view, because another thread reads it, in which torch functions may be
        # intercepted.
        self._host_view = self._copy.numpy()
        self._num_launched = 0
        self._launches: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=_MAX_LAUNCHES)

    @torch.no_grad()
    def advance(self) -> None:
        """Make the device count one part; call this at the beginning of a part inside a capture."""
        self._counter.add_(1)
        self._copy.copy_(self._counter, non_blocking=True)

    def launch(self, parts: Sequence[str]) -> None:
        """Record that the host now launches parts, in the order in which the device begins them."""
        self._launches.append((self._num_launched, tuple(parts)))
        self._num_launched += len(parts)

    @property
    def progress(self) -> DeviceProgress | None:
        """Return the progress of the device without a wait; None before the first launch."""
        if self._num_launched == 0:
            return None
        begun = int(self._host_view)
        part = ""
        for first, parts in reversed(tuple(self._launches)):
            if first < begun <= first + len(parts):
                part = parts[begun - first - 1]
        return DeviceProgress(begun, self._num_launched, part)


class Call(NamedTuple):
    """One collective of one rank.

    Args:
        number: Number of collectives that this rank has started on the axis, including this one.
        ranks: Global ranks that take part; for an exchange with neighbours only the other ranks.
    """

    kind: str
    axis: str
    number: int
    ranks: tuple[int, ...]

    @property
    def is_exchange(self) -> bool:
        """Return whether this is an exchange between neighbours.

        Its number cannot be compared: ranks may exchange with their neighbours at different rates.
        """
        return self.axis.endswith(NEIGHBOURS)


class RecordedCall(NamedTuple):
    """Collective in a captured computation, recorded once at its capture; see :class:`Call`."""

    kind: str
    axis: str
    ranks: tuple[int, ...]


class Journal:
    """Counter of one rank's collectives by axis.

    All ranks of an axis run the same collectives in the same order. If ranks hang, those with the
    smallest count have not arrived yet. Exchanges between neighbours have separate counters,
    because their number may differ between ranks.
    """

    __slots__ = (
        "_destroyed", "_label", "_last", "_recorded", "counts", "device", "num_replayed", "parts"
    )  # fmt: skip

    def __init__(self) -> None:
        self._destroyed: frozenset[str] = frozenset()
        self.counts: dict[str, int] = {}
        #: Number of those that replays of graphs have started, for which no host waits.
        self.num_replayed = 0
        self._last: tuple[str, str, int, tuple[int, ...]] | None = None
        self._recorded: list[RecordedCall] | None = None
        self._label = ""
        #: Counter that captured parts increment on the device; None if nothing reads it.
        self.device: DeviceCounter | None = None
        #: Descriptions of the parts that the recording has marked; a new list in each recording.
        self.parts: list[str] = []

    def note(
        self, kind: str, axis: str, ranks: tuple[int, ...]
    ) -> tuple[str, str, int, tuple[int, ...]]:
        """Count a collective just before it starts, and return the argument of :meth:`record_wait`.

        While :meth:`recording` is active, the collective is recorded instead of counted.
        """
        if self._destroyed and axis.split()[0] in self._destroyed:
            raise _after_the_run(kind, axis, ranks)
        if self._recorded is not None:
            if not self.parts:
                self.begin_part(self._label)
            self._recorded.append(RecordedCall(kind, axis, ranks))
            return kind, axis, self.counts.get(axis, 0), ranks
        # A plain tuple, because this runs before every collective and must take less than a
        # microsecond.
        number = self.counts[axis] = self.counts.get(axis, 0) + 1
        self._last = call = (kind, axis, number, ranks)
        return call

    def end(self, axes: Iterable[str]) -> None:
        """Refuse further collectives on these axes, because their groups have been destroyed."""
        self._destroyed = frozenset(axes)

    def record_wait(self, call: tuple[str, str, int, tuple[int, ...]] | None) -> None:
        """Record that this rank now waits for an earlier collective, which becomes :attr:`last`."""
        if self._recorded is None:
            self._last = call

    def begin_part(self, part: object) -> None:
        """Record the beginning of a part of a computation, which the device will count.

        Without :meth:`recording`, or without :attr:`device`, nothing happens.
        """
        if self._recorded is not None and self.device is not None:
            self.parts.append(str(part))
            self.device.advance()

    @property
    def is_recording(self) -> bool:
        """Return whether a computation is captured now, whose collectives do not start."""
        return self._recorded is not None

    @contextmanager
    def recording(self, label: str = "") -> Iterator[list[RecordedCall]]:
        """Record the collectives that the block starts, in their order, without counting them.

        A CUDA graph is captured once and replayed often. Its capture starts no collective on the
        device, and its replays run no Python that would count one. The code that replays the graph
        therefore passes the recorded list to :meth:`repeat` before every replay. The counts are
        then those of the same computation without a graph.

        Args:
            label: Description of the computation, whose first collective begins a part if no part
                has begun before.
        """
        if self._recorded is not None:
            raise RuntimeError(
                "recordings of collectives must not be nested, because a collective would belong "
                "to two captured computations. End the first recording before the next one starts."
            )
        recorded = self._recorded = []
        self._label = label
        self.parts = []
        try:
            yield recorded
        finally:
            self._recorded = None

    def repeat(self, calls: Sequence[RecordedCall], label: str, parts: Sequence[str] = ()) -> None:
        """Count recorded collectives again, just before the replay that starts them.

        Args:
            label: Description of the replay, such as ``replay of layers 3..4, backward, 6
                collectives``. :attr:`last` then has this text as its kind, with the axis of the
                last recorded collective, because the host cannot know which collective of a replay
                the device has reached.
        """
        for kind, axis, ranks in calls:
            self.note(kind, axis, ranks)
        self.num_replayed += len(calls)
        if calls and self._last is not None:
            _, axis, number, ranks = self._last
            self._last = (label, axis, number, ranks)
        if parts and self.device is not None:
            self.device.launch(parts)

    @property
    def last(self) -> Call | None:
        """Return the collective that was last started or waited for."""
        last = self._last
        return None if last is None else Call(*last)


def _after_the_run(kind: str, axis: str, ranks: tuple[int, ...]) -> UnsupportedError:
    return UnsupportedError(
        "a model that is sharded by tp, cp, pp or ep must be called while fit, validate, test or "
        f"predict runs: {kind} over {axis} (ranks {list(ranks)}) was called after the run, which "
        "has destroyed its process groups. Call the model in a hook such as on_train_end or "
        "on_fit_end, or by trainer.predict. To use it in one process, save it (save_pretrained, or "
        "lightning-megatron checkpoint consolidate) and load its files in that process."
    )
