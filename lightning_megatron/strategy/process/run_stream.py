"""CUDA stream of a run, which graphs can capture."""

from __future__ import annotations

import torch


class RunStream:
    """Stream of a GPU on which everything between two points of the program runs.

    Nothing can be captured on the default stream. A node of autograd that adds up a parameter's
    gradients, a hook and an optimizer keep the stream on which they were made. So the stream must
    be current before modules are made.

    Args:
        device: GPU of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._previous: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """Make the stream current in this thread; it first waits for the one that was."""
        if self._previous is None:
            self._previous = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(self._previous)
            torch.cuda.set_stream(self._stream)

    def leave(self) -> None:
        """Make the earlier stream current again; it first waits for this one."""
        if self._previous is not None:
            self._previous.wait_stream(self._stream)
            torch.cuda.set_stream(self._previous)
            self._previous = None
