"""Host copies of integer tensors, recorded when a batch moves to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from typing_extensions import override

#: Largest ratio of a storage to a part of it for which the whole storage is read.
_MAX_RATIO = 1024


@dataclass(frozen=True, eq=False)
class _CachedValues:
    """Values of a storage, and the versions of both tensors for which the values are valid."""

    storage: StorageWeakRef
    values: Tensor
    version: int
    version_on_host: int


class HostValues:
    """Host copies of integer tensors that are on a device.

    The masks, positions and labels of a batch are on the host before it moves to the device. Code
    that decides by these values reads the host copies, also for slices of tensors in microbatches,
    so that the host does not wait for the device. A tensor that was created on the device is read
    once in full, for all of its slices. A tensor that is written in place is read again.

    No value is returned while a graph is captured, because the graph would repeat the decision.
    """

    def __init__(self) -> None:
        self._cache: dict[int, _CachedValues] = {}
        #: Number of reads for which the host had to wait for a device.
        self.num_reads = 0

    @contextmanager
    def record_moves(self) -> Iterator[None]:
        """Record the values of integer tensors that move from the host to a device in the block.

        The values of the previous batch are discarded. The moved tensors are not inference tensors,
        because these lack the version counters that reveal a later write.
        """
        self._cache.clear()
        has_gradients = torch.is_grad_enabled()
        # Outside of inference mode gradients would be enabled.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(has_gradients),
            _RecordedMoves(self),
        ):
            yield

    def note(self, tensor: Tensor, values: Tensor) -> None:
        """Record the values of a tensor that fills its storage, given the same on the host."""
        is_whole = tensor.is_contiguous() and not tensor.storage_offset()
        if not is_whole or tensor.is_inference() or values.is_inference():
            return
        storage = StorageWeakRef(tensor.untyped_storage())
        values = values.contiguous().view(-1)
        known = _CachedValues(storage, values, tensor._version, values._version)
        self._cache = {
            key: entry for key, entry in self._cache.items() if not entry.storage.expired()
        }
        self._cache[storage.cdata] = known

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor on the host; None if the host would have to read them."""
        if type(tensor) is not Tensor or _is_capturing(tensor.device):
            return None
        if tensor.is_inference():
            return tensor if _is_on_host(tensor) else None
        known = self._cache.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        if known is None:
            return tensor if _is_on_host(tensor) else None
        versions = tensor._version, known.values._version
        if versions != (known.version, known.version_on_host):
            return None
        if known.values.dtype != tensor.dtype:
            return None
        return known.values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor on the host; wait for the device if they are unknown."""
        copied = self.of(tensor)
        if copied is not None or _is_on_host(tensor):
            return tensor if copied is None else copied
        self.num_reads += 1
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if type(tensor) is not Tensor or not 0 < size <= _MAX_RATIO * tensor.numel():
            return tensor.cpu()
        whole = tensor.as_strided((size,), (1,), 0)
        self.note(whole, whole.cpu())
        copied = self.of(tensor)
        return tensor.cpu() if copied is None else copied


class _RecordedMoves(TorchFunctionMode):
    """Record the integer tensors that moves from the host return."""

    def __init__(self, host: HostValues) -> None:
        super().__init__()
        self._host = host

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            source = args[0]
            has_left = source.device.type == "cpu" != result.device.type
            if has_left and not source.is_floating_point() and source.dtype == result.dtype:
                self._host.note(result, source)
        return result


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
