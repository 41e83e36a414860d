"""Clock of a device, whose marks do not make the host wait."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceClock:
    """Clock that marks moments on a device.

    A mark on a GPU is an event of the current stream; on a CPU it is the time itself.

    Args:
        device: Device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return a mark of the moment when the device reaches this point."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait until the device has reached all marks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the time between two marks that the device has reached (seconds)."""
        if self._device.type != "cuda":
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1e3
