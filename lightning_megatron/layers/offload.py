"""Offload of layers' inputs to host memory until their backward passes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.shapes import Shaped

#: Maximum number of inputs on the device that a forward pass is copying to the host.
IN_FLIGHT = 2


class Copies:
    """Copies between a device and its host, on one CUDA stream for each direction.

    Tensors on the CPU are copied at once.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._leaving = torch.cuda.Stream(device) if is_cuda else None
        self._arriving = torch.cuda.Stream(device) if is_cuda else None

    def leave(self, tensor: Shaped[Tensor, "..."]) -> tuple[Shaped[Tensor, "..."], Any]:
        """Start a copy to pinned memory, after the computation of the tensor.

        The results are the copy and its event for :meth:`wait`. The caller must keep the tensor
        alive until it has waited for the copy.
        """
        pins = self._leaving is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pins)
        return host, self._copied(host, tensor, self._leaving)

    def arrive(
        self, host: Shaped[Tensor, "..."], device: torch.device
    ) -> tuple[Shaped[Tensor, "..."], Any]:
        """Start a copy to the device, after earlier computation that used the same memory."""
        tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
        return tensor, self._copied(tensor, host, self._arriving)

    def wait(self, event: Any) -> None:
        """Make the current stream wait for a copy; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _copied(self, target: Tensor, source: Tensor, stream: Any) -> Any:
        if stream is None:
            target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()


class _Input:
    """Input of a layer: on the device, on the host, or being copied between both."""

    def __init__(self, tensor: Tensor, copies: Copies, previous: _Input | None) -> None:
        self._copies = copies
        self._device = tensor.device
        #: Input of the previous layer, which the backward pass needs next.
        self.previous = previous
        self._host, self._event = copies.leave(tensor)
        self._device_tensor: Tensor | None = tensor

    def release(self) -> None:
        """Free the memory of the device once the copy to the host is complete."""
        if self._device_tensor is not None:
            self._copies.wait(self._event)
            self._device_tensor = None

    def fetch(self) -> None:
        if self._device_tensor is None:
            self._device_tensor, self._event = self._copies.arrive(self._host, self._device)

    def take(self) -> Tensor:
        """Return the input, and start to fetch the input of the previous layer."""
        self.fetch()
        tensor = self._device_tensor
        assert tensor is not None, "the input has been fetched"
        self._copies.wait(self._event)
        self._device_tensor = None
        if self.previous is not None:
            self.previous.fetch()
        return tensor


class HostOffload:
    """Offload of the inputs of layers to host memory between their forward and backward passes.

    Forward passes copy each input to pinned memory while later layers run, and leave at most
    ``IN_FLIGHT`` inputs on the device. A backward pass fetches the input of one layer while the
    layer after it runs. The copies are bitwise equal.

    Args:
        firsts: Indices of the first layers of forward passes, at which prefetching ends.

    Source: Rajbhandari et al. 2020, section 5.2 (P_a+cpu).
    """

    def __init__(self, firsts: frozenset[int]) -> None:
        self._firsts = firsts
        self._copies: Copies | None = None
        self._leaving = deque[_Input]()
        # Autograd graphs own the inputs and free them, so this reference must be weak.
        self._last: weakref.ref[_Input] | None = None

    @contextmanager
    def save_on_host(self, hidden: Shaped[Tensor, "..."], layer: int) -> Iterator[None]:
        """Make autograd save ``hidden`` in host memory for operators inside the block.

        It is the input of a layer, which the block does not write to.
        """
        # Autograd keeps the functions, so they must not refer to the tensor.
        storage = hidden.untyped_storage()._cdata
        shape = hidden.shape

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage or tensor.shape != shape:
                return tensor
            return self._put(tensor.detach(), layer)

        def unpack(packed: Any) -> Tensor:
            tensor: Tensor = packed.take() if isinstance(packed, _Input) else packed
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _put(self, tensor: Tensor, layer: int) -> _Input:
        if self._copies is None:
            self._copies = Copies(tensor.device)
        last = None if self._last is None or layer in self._firsts else self._last()
        stored = _Input(tensor, self._copies, last)
        self._last = weakref.ref(stored)
        self._leaving.append(stored)
        while len(self._leaving) > IN_FLIGHT:
            self._leaving.popleft().release()
        return stored
