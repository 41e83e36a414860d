"""Counter of the captured parts that a device has begun, readable while CUDA graphs run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Number of launches whose parts are stored. A host never runs so many launches ahead of a device.
_MAX_LAUNCHES = 4096


class DeviceProgress(NamedTuple):
    """Progress of a device through the captured parts that its host has launched.

    Args:
        begun: Number of parts that the device has begun.
        launched: Number of parts that the host has launched.
        part: Description of the last part that the device has begun; empty if unknown.
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

    Args:
        device: Device of the graphs.
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
        """Record that the host now launches parts.

        Args:
            parts: Descriptions of the parts, in the order in which the device begins them.
        """
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
