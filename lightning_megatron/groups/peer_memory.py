"""Memory of a rank that the other ranks of an axis write into, without its doing anything."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

#: What is asked for to see whether memory can be shared at all (bytes).
_TRIAL = 16
#: How many views of a region are remembered: the number of tokens may differ from step to step.
_REMEMBERED_VIEWS = 1024


@dataclass(frozen=True)
class PeerRegion:
    """Hold memory of one size on every rank of an axis.

    Args:
        memory: That of this rank, in bytes.
        pointers: The addresses of the memory of every rank, by its position, int64 on the device; None on CPUs, where
            nobody can write into the memory of others.
    """

    memory: Tensor
    pointers: Tensor | None = None
    _handle: Any = field(default=None, repr=False)
    _views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a part of this rank's memory as a tensor, which is remembered for the next time.

        Args:
            start: Where it begins (bytes).
            shape: Its sizes.
            dtype: Its type.
        """
        key = (start, shape, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) == _REMEMBERED_VIEWS:
                self._views.clear()
            # Training goes on with views that a validation before it may have asked for.
            with torch.inference_mode(False):
                size = math.prod(shape) * dtype.itemsize
                found = self._views[key] = self.memory[start : start + size].view(dtype).view(shape)
        return found

    def wait(self) -> None:
        """Let the current stream wait until those of all ranks have come here, and what they have written is there."""
        if self._handle is not None:
            self._handle.barrier()


class PeerMemory:
    """Keep the region of one axis, which all that put rows over the axis share.

    It grows where it must, and is given back with the groups. All ranks use it in the same order, each on one stream.
    """

    def __init__(self) -> None:
        self._region: PeerRegion | None = None
        self._is_captured = False
        #: Regions whose addresses are in graphs.
        self._kept: list[PeerRegion] = []
        self._verdict: tuple[str | None] | None = None

    def why_not(self, group: dist.ProcessGroup | None, device: torch.device, missing: str | None = None) -> str | None:
        """Say why the ranks of a group cannot write into each other's memory; None means that they can.

        All get the same answer.

        Args:
            group: The ranks.
            device: That of this rank.
            missing: What this rank has against it already.

        Communication: ranks on GPUs compare what they found, and try it, at the first call.
        """
        if device.type != "cuda":
            return f"ranks are on {device.type}"
        assert group is not None, "a rank alone has nobody to ask"
        if self._verdict is None:
            reason = _first_reason(missing or _reason(), group) or _first_reason(self._try(group, device), group)
            self._verdict = (reason,)
        return self._verdict[0]

    def _try(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        try:
            self.reserve(group, _TRIAL, device)
        except RuntimeError as error:
            return f"torch's symmetric memory fails ({str(error).splitlines()[0]})"
        return None

    def reserve(self, group: dist.ProcessGroup | None, num_bytes: int, device: torch.device) -> PeerRegion:
        """Return the region, of at least so many bytes; all ranks ask for the same.

        Raises:
            RuntimeError: If it would have to grow while a graph is captured.

        Communication: where it grows, the ranks of the group wait for each other.
        """
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._region is None or self._region.memory.numel() < num_bytes:
            if is_captured:
                raise RuntimeError(
                    f"memory that ranks share must be there before a graph is captured: {num_bytes} bytes are needed. "
                    "To make it, ranks wait for each other. Run what is captured once before, with as many tokens."
                )
            # Training goes on with memory that a validation before it may have asked for.
            with torch.inference_mode(False):
                self._grow(group, num_bytes, device)
        self._is_captured |= is_captured
        assert self._region is not None, "there is one now"
        return self._region

    def _grow(self, group: dist.ProcessGroup | None, num_bytes: int, device: torch.device) -> None:
        before, self._region = self._region, None
        if device.type != "cuda":
            self._region = PeerRegion(torch.empty(num_bytes, dtype=torch.uint8, device=device))
            return
        assert group is not None, "there is nobody to share it with"
        if before is not None and self._is_captured:
            self._kept.append(before)
        # What this rank has put into the old memory of others has arrived then, and ranks meet on the next line:
        # behind it nobody writes there any more.
        torch.cuda.synchronize(device)
        self._region, self._is_captured = _shared(group, num_bytes, device), False

    def release(self) -> None:
        """Give the memory back."""
        self._region, self._verdict = None, None
        self._kept.clear()


def _shared(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerRegion:
    memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    # Newer versions of torch can lay several tensors into one allocation, whose addresses these are.
    offset = getattr(handle, "offset", 0)
    addresses = [int(address) + offset for address in handle.buffer_ptrs]
    if addresses[handle.rank] != memory.data_ptr():
        raise RuntimeError("the addresses of shared memory are not those of the tensors that lie there")
    return PeerRegion(memory, torch.tensor(addresses, dtype=torch.int64, device=device), handle)


def _reason() -> str | None:
    """Return what this rank has against it."""
    # Its objects can leave the GPUs of a host that others share out of service, and nothing here has a use for them.
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, torch.cuda.current_device()):
        return (
            "torch would set up NVLink multicast for it, which nothing here needs; the environment variable "
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 switches that off"
        )
    return None


def _first_reason(reason: str | None, group: dist.ProcessGroup) -> str | None:
    """Return the first reason that a rank of the group has, or that they are on different hosts."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (socket.gethostname(), reason), group=group)
    if len({host for host, _ in found}) > 1:
        return "the ranks are on different hosts"
    return next((reason for _, reason in found if reason is not None), None)
