"""Copies of tensors in host memory, so that training continues while a checkpoint is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_megatron.checkpoint.entries import BoxToWrite

#: Usual size of a buffer (bytes). A large piece needs a larger buffer, and a few small pieces need
#: a smaller one. Sizes are powers of two, because the allocator of pinned memory rounds up to
#: these.
_BUFFER = 1 << 28
#: Alignment of a copy within a buffer (bytes).
_ALIGNMENT = 64


@dataclass
class _Buffer:
    memory: Tensor
    used: int = 0


@dataclass
class HostCopies:
    """Reusable host memory for copies of tensors, pinned if the tensors are on a GPU.

    On a GPU, copies run on a separate stream beside the computation. A copy to the host takes
    longer than a training step, during which the tensor must not change. Tensors that fit into
    unused GPU memory are therefore first cloned on the GPU, which is about a hundred times faster.
    Only the other tensors must stay unchanged until their copies are on the host.
    """

    device: torch.device
    _buffers: list[_Buffer] = field(default_factory=list)
    _stream: torch.cuda.Stream | None = None
    _originals_read: torch.cuda.Event | None = None
    _copied: torch.cuda.Event | None = None

    def copy(self, pieces: Sequence[BoxToWrite]) -> list[BoxToWrite]:
        """Start to copy pieces, and return them with host tensors in place of their views.

        The previous copies are overwritten. On a GPU, call :meth:`wait_for_snapshot` before a
        tensor is changed, and :meth:`wait` before a copy is read.
        """
        hosts = self._host_tensors([piece.view for piece in pieces])
        if self.device.type != "cuda":
            for piece, host in zip(pieces, hosts, strict=True):
                host.copy_(piece.view)
        else:
            self._copy_from_gpu(list(zip(pieces, hosts, strict=True)))
        return [replace(piece, view=host) for piece, host in zip(pieces, hosts, strict=True)]

    def reserve(self, pieces: Sequence[BoxToWrite]) -> None:
        """Allocate the memory for copies of these pieces before the first save.

        Pinning a few gigabytes takes about a second.
        """
        self._host_tensors([piece.view for piece in pieces])

    def wait_for_snapshot(self) -> None:
        """Make later GPU work wait until the original tensors have been read.

        The host does not wait.
        """
        if self._originals_read is not None:
            torch.cuda.current_stream(self.device).wait_event(self._originals_read)

    def wait(self) -> None:
        """Wait until the copies are in host memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def free(self) -> None:
        """Release the memory."""
        self._buffers.clear()

    def _copy_from_gpu(self, pairs: Sequence[tuple[BoxToWrite, Tensor]]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        # Tensors that the next forward pass may change come first. Those without room for a clone
        # must be copied on the current stream, which delays that pass.
        pairs = sorted(pairs, key=lambda pair: not pair[0].changes_in_forward)
        on_gpu = [(piece, host) for piece, host in pairs if piece.view.device.type == "cuda"]
        fits = choose_fitting([piece.view.nbytes for piece, _ in on_gpu], spare_memory(self.device))
        originals: list[tuple[Tensor, Tensor]] = []
        clones: list[tuple[Tensor, Tensor]] = []
        for (piece, host), fit in zip(on_gpu, fits, strict=True):
            if fit:
                clone = piece.view.clone(memory_format=torch.contiguous_format)
                # The allocator must not reuse the clone's memory before the copy stream has read
                # it.
                clone.record_stream(self._stream)
                clones.append((clone, host))
            elif piece.changes_in_forward:
                host.copy_(piece.view, non_blocking=True)
            else:
                originals.append((piece.view, host))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # Originals first: training waits for these only, see `wait_for_snapshot`.
        self._originals_read = self._send(originals)
        self._copied = self._send(clones)
        for piece, host in pairs:
            if piece.view.device.type != "cuda":
                host.copy_(piece.view)

    def _send(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Start copies to the host on the copy stream, and return an event that marks their end."""
        assert self._stream is not None, "made before the first copy"
        with torch.cuda.stream(self._stream):
            for source, host in pairs:
                host.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _host_tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return host tensors with the shapes and dtypes of other tensors.

        Each storage is no larger than its tensor, because ``torch.save`` writes complete storages.
        """
        for buffer in self._buffers:
            buffer.used = 0
        padded = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
        copies: dict[int, Tensor] = {}
        left = sum(padded)
        # Largest first, so that small tensors fill the rest of a buffer.
        for index in sorted(range(len(like)), key=lambda index: -padded[index]):
            fits = (
                buffer
                for buffer in self._buffers
                if buffer.memory.nbytes - buffer.used >= padded[index]
            )
            buffer = next(fits, None) or self._grow(max(padded[index], min(left, _BUFFER)))
            storage = buffer.memory.untyped_storage()[
                buffer.used : buffer.used + like[index].nbytes
            ]
            buffer.used += padded[index]
            left -= padded[index]
            host = torch.empty(0, dtype=like[index].dtype)
            copies[index] = host.set_(storage, 0, like[index].shape)  # type: ignore[call-overload]
        return [copies[index] for index in range(len(like))]

    def _grow(self, size: int) -> _Buffer:
        size = 1 << max(size - 1, 0).bit_length()
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._buffers.append(_Buffer(memory))
        return self._buffers[-1]


def spare_memory(device: torch.device) -> int:
    """Return the GPU memory that this process never used, less a reserve of 1/16 (bytes)."""
    free, total = torch.cuda.mem_get_info(device)
    may_take = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    return max(0, free - may_take - total // 16)


def choose_fitting(sizes: Sequence[int], room: int) -> list[bool]:
    """Choose sizes in order while they fit into the remaining room; return a flag for each size."""
    chosen = []
    for size in sizes:
        chosen.append(size <= room)
        room -= size if chosen[-1] else 0
    return chosen
