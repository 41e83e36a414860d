"""Rows beyond a limit that a run needed on any rank, read while the device still computes."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep

import torch

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.pending import start_all_reduce
from lightning_megatron.shapes import Int

#: Value of the host's copy before the device has written it; no number of rows is so small.
_NOT_WRITTEN = torch.iinfo(torch.int32).min
#: Interval between reads of the host's copy (seconds).
_PAUSE = 20e-6


class RowExcess:
    """Largest number of rows beyond a limit, over the passes of a run and over all ranks.

    All tensors keep their addresses, so that a CUDA graph may hold :meth:`add` and :meth:`start`.
    The device writes the result into pinned memory, which the host reads without waiting for an
    event: an event of a replay could still be that of the previous replay.
    """

    def __init__(self, device: torch.device, world: MeshAxis) -> None:
        is_cuda = device.type == "cuda"
        # Validation may come first, and graphs cannot write tensors of its inference mode later.
        with torch.inference_mode(False):
            self._max_rows = torch.zeros(1, dtype=torch.int32, device=device)
            self._excess = torch.zeros_like(self._max_rows)
            self._on_host = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        self._world = world
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._reference: int | None = None

    def clear(self) -> None:
        """Reset before the next run; the host must have waited for the last result."""
        self._max_rows.zero_()
        self._on_host.fill_(_NOT_WRITTEN)

    def forget_limit(self) -> None:
        """Allow another limit from the next pass on; no captured graph may be replayed again."""
        self._reference = None

    @torch.no_grad()
    def add(self, needed: Int[torch.Tensor, "1"], limit: int) -> None:
        """Add the rows that this rank needs in a pass of ``limit`` rows; the host reads nothing."""
        if self._reference is None:
            self._reference = limit
        # The rows are counted as if all passes had the limit of the first one, so that one number
        # is enough for all shapes, and one launch for the usual case of one shape.
        shift = self._reference - limit
        torch.maximum(self._max_rows, needed + shift if shift else needed, out=self._max_rows)

    @torch.no_grad()
    def start(self) -> Callable[[], None]:
        """Start the maximum over all ranks and its copy to the host, concurrently with later work.

        Returns:
            Function to call on the same stream when the run ends, so that a capture joins all work
            that it started.

        Communication: one all-reduce of a number over the world on the device.
        """
        torch.sub(self._max_rows, self._reference or 0, out=self._excess)
        pending = start_all_reduce(self._excess, self._world, "max")
        stream = self._stream
        if stream is None:

            def finish() -> None:
                pending.wait()
                self._on_host.copy_(self._excess)

            return finish
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pending.wait()
            self._on_host.copy_(self._excess, non_blocking=True)
        return lambda: torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> int:
        """Wait for the result of the device, and return it; above 0, rows were missing."""
        while (excess := int(self._on_host)) == _NOT_WRITTEN:
            # The query raises the errors of the device, after which the result would never come.
            torch.cuda.current_stream().query()
            sleep(_PAUSE)
        return excess
