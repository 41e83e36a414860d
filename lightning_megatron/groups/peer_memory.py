"""Symmetric memory of an axis, into which other ranks write without action of the owner."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

#: Size of the allocation that tests whether memory can be shared (bytes).
_TEST_BYTES = 16
#: Maximum number of cached views of a region; the number of tokens may differ from step to step.
_REMEMBERED_VIEWS = 1024


#: Use of a region of shared memory. Each use has its own region, because the lifetimes differ.
PeerUse = Literal[
    "tokens",
    "tokens again",
    "clone counts",
    "clone weights",
    "clone gradients",
    "sums",
    "magnitudes",
    "token sums",
]


@dataclass(frozen=True)
class PeerRegion:
    """Symmetric memory: one buffer of the same size on every rank of an axis.

    Args:
        pointers: Addresses of the buffers by position of their rank, int64 on the device; None on
            CPUs, where ranks cannot write into each other's memory.
    """

    memory: Tensor
    pointers: Tensor | None = None
    _handle: Any = field(default=None, repr=False)
    _views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = field(
        default_factory=dict, repr=False
    )

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the part of this rank's buffer from byte ``start`` on; the view is cached."""
        key = (start, shape, dtype)
        cached = self._views.get(key)
        if cached is None:
            if len(self._views) == _REMEMBERED_VIEWS:
                self._views.clear()
            # Not an inference tensor: validation may create the view, and training may use it.
            with torch.inference_mode(False):
                size = math.prod(shape) * dtype.itemsize
                cached = self._views[key] = (
                    self.memory[start : start + size].view(dtype).view(shape)
                )
        return cached

    def wait(self) -> None:
        """Let the current stream wait for the streams of all ranks, and for their writes."""
        if self._handle is not None:
            self._handle.barrier()


class PeerMemory:
    """Regions of one axis, one for each use, shared by all layers that send rows over the axis.

    The regions grow on demand and are freed with the process groups. All ranks use them in the same
    order, each on one stream.
    """

    def __init__(self) -> None:
        self._regions: dict[PeerUse, PeerRegion] = {}
        #: Uses whose regions are in captured CUDA graphs.
        self._captured: set[PeerUse] = set()
        #: Old regions whose addresses are in captured CUDA graphs.
        self._replaced_regions: list[PeerRegion] = []
        self._verdict: tuple[str | None] | None = None

    def reason_unavailable(
        self, group: dist.ProcessGroup | None, device: torch.device, missing: str | None = None
    ) -> str | None:
        """Return why ranks cannot write into each other's memory; None if they can.

        The answer is the same on all ranks. ``missing`` is a reason that the caller knows already.

        Communication: on GPUs, the first call gathers the reasons of all ranks, and allocates a
            small region as a test.
        """
        if device.type != "cuda":
            return f"ranks are on {device.type}"
        assert group is not None, "GPUs share memory only within a process group"
        if self._verdict is None:
            reason = _first_reason(missing or _reason(), group) or _first_reason(
                self._try(group, device), group
            )
            self._verdict = (reason,)
        return self._verdict[0]

    def forbid(self, reason: str) -> None:
        """Let ranks not write into each other's memory, for this reason."""
        self._verdict = (reason,)

    def _try(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        try:
            self.reserve(group, _TEST_BYTES, device)
        except RuntimeError as error:
            return f"torch's symmetric memory fails ({str(error).splitlines()[0]})"
        return None

    def reserve(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int,
        device: torch.device,
        use: PeerUse = "tokens",
    ) -> PeerRegion:
        """Return a region of at least ``num_bytes``, the same on all ranks.

        A region cannot grow inside a capture.

        Communication: the ranks of the group wait for each other if the region grows.
        """
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        region = self._regions.get(use)
        if region is None or region.memory.numel() < num_bytes:
            if is_captured:
                raise RuntimeError(
                    "shared memory must be allocated before a graph is captured, because its "
                    f"allocation waits for other ranks: {num_bytes} bytes are needed for {use}. "
                    "Run the code once before the capture, with the same number of tokens."
                )
            # Not an inference tensor: validation may allocate the memory, and training may use it.
            with torch.inference_mode(False):
                region = self._grow(group, num_bytes, device, use)
        if is_captured:
            self._captured.add(use)
        return region

    def wait(self) -> None:
        """Let the current stream wait for the streams of all ranks, and for their writes.

        Without a region there is nothing to wait for: all ranks wait when the first one is
        allocated.
        """
        if not self._regions:
            return
        use, region = next(iter(self._regions.items()))
        if region.memory.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.add(use)
        region.wait()

    def _grow(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int,
        device: torch.device,
        use: PeerUse,
    ) -> PeerRegion:
        before = self._regions.pop(use, None)
        if device.type != "cuda":
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._regions[use] = PeerRegion(memory)
            return self._regions[use]
        assert group is not None, "GPUs share memory only within a process group"
        if before is not None and use in self._captured:
            self._replaced_regions.append(before)
        # The old region must not be freed before all ranks have finished their writes into it.
        # The synchronization completes the writes of this rank, and the rendezvous in _shared waits
        # for all ranks.
        torch.cuda.synchronize(device)
        self._regions[use] = _shared(group, num_bytes, device)
        self._captured.discard(use)
        return self._regions[use]

    def release(self) -> None:
        """Free the memory."""
        self._regions.clear()
        self._captured.clear()
        self._verdict = None
        self._replaced_regions.clear()


def _shared(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerRegion:
    memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    # Unwritten memory must be finite, because kernels multiply the values beyond a weight's end by
    # zero. Other ranks write only after the rendezvous.
    memory.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(memory, group)
    # Newer versions of torch can place several tensors into one allocation; buffer_ptrs are
    # addresses of allocations.
    offset = getattr(handle, "offset", 0)
    addresses = [int(address) + offset for address in handle.buffer_ptrs]
    if addresses[handle.rank] != memory.data_ptr():
        raise RuntimeError(
            "the addresses of shared memory differ from the addresses of its tensors"
        )
    return PeerRegion(memory, torch.tensor(addresses, dtype=torch.int64, device=device), handle)


def _reason() -> str | None:
    """Return why this rank cannot use symmetric memory."""
    # Multicast objects can disable the GPUs of a shared host, and this package does not use them.
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, torch.cuda.current_device()):
        return (
            "torch would set up NVLink multicast for it, which is not needed; the environment "
            "variable TORCH_SYMM_MEM_DISABLE_MULTICAST=1 disables it"
        )
    return None


def _first_reason(reason: str | None, group: dist.ProcessGroup) -> str | None:
    """Return the first reason that any rank has, or that the ranks are on different hosts."""
    replies: list[Any] = [None] * group.size()
    dist.all_gather_object(replies, (socket.gethostname(), reason), group=group)
    if len({host for host, _ in replies}) > 1:
        return "the ranks are on different hosts"
    return next((reason for _, reason in replies if reason is not None), None)
