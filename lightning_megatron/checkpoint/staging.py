"""Copies of the pieces to write in host memory, so that training may go on while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_megatron.checkpoint.planners import BoxToWrite

#: Buffers are of this size, or larger for one large piece, or smaller for few small ones; always a power of two, as the
#: allocator of pinned memory rounds up to one (bytes).
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
        hosts = self._take([piece.view for piece in pieces])
        if self.device.type != "cuda":
            for piece, host in zip(pieces, hosts, strict=True):
                host.copy_(piece.view)
        else:
            self._copy_from_gpu(list(zip(pieces, hosts, strict=True)))
        return [replace(piece, view=host) for piece, host in zip(pieces, hosts, strict=True)]

    def reserve(self, pieces: Sequence[BoxToWrite]) -> None:
        """Take the memory for such pieces now: pinning it takes about a second for some gigabytes, once."""
        self._take([piece.view for piece in pieces])

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

    def _take(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return host memory of the shapes and dtypes of tensors; the storage of each is no larger than it."""
        for buffer in self._buffers:
            buffer.used = 0
        padded = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
        taken, left = {}, sum(padded)
        # The largest first, so that what is left of a buffer takes the small ones.
        for index in sorted(range(len(like)), key=lambda index: -padded[index]):
            fits = (one for one in self._buffers if one.memory.nbytes - one.used >= padded[index])
            buffer = next(fits, None) or self._grow(max(padded[index], min(left, _BUFFER)))
            storage = buffer.memory.untyped_storage()[buffer.used : buffer.used + like[index].nbytes]
            buffer.used += padded[index]
            left -= padded[index]
            host = torch.empty(0, dtype=like[index].dtype)
            taken[index] = host.set_(storage, 0, like[index].shape)  # type: ignore[call-overload]
        return [taken[index] for index in range(len(like))]

    def _grow(self, size: int) -> _Buffer:
        size = 1 << max(size - 1, 0).bit_length()
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._buffers.append(_Buffer(memory))
        return self._buffers[-1]
