"""Copies of the pieces to write in host memory, so that training may go on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_megatron.checkpoint.planners import BoxToWrite

#: Buffers are of this size or larger; a power of two, as the allocator of pinned memory rounds up to one (bytes).
_BUFFER = 1 << 28
_ALIGNMENT = 64


@dataclass
class _Buffer:
    memory: Tensor
    used: int = 0


@dataclass
class HostCopies:
    """Copy pieces to host memory that is kept for the next time: pinned where they come from a GPU.

    A GPU copies on a stream of its own, beside the computation.

    Args:
        device: Device of the tensors.
    """

    device: torch.device
    _buffers: list[_Buffer] = field(default_factory=list)
    _stream: torch.cuda.Stream | None = None
    _copied: torch.cuda.Event | None = None

    def copy(self, pieces: Sequence[BoxToWrite]) -> list[BoxToWrite]:
        """Start copying and return the pieces with host tensors in place of their views.

        The previous copies are overwritten. On a GPU call :meth:`hold_updates` before a tensor is changed, and
        :meth:`wait` before a copy is read.
        """
        for buffer in self._buffers:
            buffer.used = 0
        # The largest first, so that what is left of a buffer takes the small ones.
        order = sorted(range(len(pieces)), key=lambda index: -pieces[index].view.nbytes)
        hosts = {index: self._take(pieces[index].view) for index in order}
        if self.device.type != "cuda":
            for index, piece in enumerate(pieces):
                hosts[index].copy_(piece.view)
        else:
            self._copy_from_gpu([(piece, hosts[index]) for index, piece in enumerate(pieces)])
        return [replace(piece, view=hosts[index]) for index, piece in enumerate(pieces)]

    def hold_updates(self) -> None:
        """Let what the GPU is told from now on wait until the copies are taken; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)

    def wait(self) -> None:
        """Wait until the copies are in host memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def free(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    def _copy_from_gpu(self, pairs: Sequence[tuple[BoxToWrite, Tensor]]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        for piece, host in pairs:
            # What the next forward pass may change is copied in its way; on the host's side it is there at once.
            if piece.changes_in_forward or piece.view.device.type != "cuda":
                host.copy_(piece.view, non_blocking=piece.view.device.type == "cuda")
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for piece, host in pairs:
                if not piece.changes_in_forward and piece.view.device.type == "cuda":
                    host.copy_(piece.view, non_blocking=True)
        self._copied = self._stream.record_event()

    def _take(self, like: Tensor) -> Tensor:
        """Return host memory of a tensor's shape and dtype, whose storage is no larger than that."""
        size = like.nbytes
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        buffer = next((one for one in self._buffers if one.memory.nbytes - one.used >= padded), None)
        if buffer is None:
            wanted = max(_BUFFER, 1 << (padded - 1).bit_length())
            memory = torch.empty(wanted, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            buffer = _Buffer(memory)
            self._buffers.append(buffer)
        storage = buffer.memory.untyped_storage()[buffer.used : buffer.used + size]
        buffer.used += padded
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape)  # type: ignore[call-overload]
