"""CUDA stream of a run, on which CUDA graphs can be captured."""

from __future__ import annotations

import torch


class RunStream:
    """CUDA stream that is current between :meth:`enter` and :meth:`leave`.

    CUDA cannot capture graphs on the default stream. The autograd nodes that accumulate gradients,
    hooks and optimizers keep the stream on which they were created. The stream must therefore be
    current before modules are created.

    Args:
        device: GPU of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._previous: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """Make the stream current in this thread, after it waits for the previous stream."""
        if self._previous is None:
            self._previous = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(self._previous)
            torch.cuda.set_stream(self._stream)

    def leave(self) -> None:
        """Make the previous stream current again, after it waits for this stream."""
        if self._previous is not None:
            self._previous.wait_stream(self._stream)
            torch.cuda.set_stream(self._previous)
            self._previous = None
