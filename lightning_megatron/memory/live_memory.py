"""Memory of live tensors, followed from operator to operator."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class LiveMemory(TorchDispatchMode):
    """Follow the bytes of all tensors that operators make inside the context, and their peak.

    Args:
        counts_meta: Whether tensors on the meta device count with the memory that they would have.
        multiple: Size of which every allocation is a multiple, as those of a GPU's allocator
            (bytes).
    """

    def __init__(self, multiple: int = 1, *, counts_meta: bool = False) -> None:
        super().__init__()
        self._counts_meta = counts_meta
        self._multiple = multiple
        self._sizes: dict[int, int] = {}
        #: Bytes of the tensors that exist now.
        self.now = 0
        #: Largest number of bytes at one time since the last :meth:`restart`.
        self.peak = 0
        #: Bytes of the tensors on the host that exist now, which are in no other number.
        self.host = 0
        self._is_on_host = False
        #: Whether tensors that are made now count.
        self.is_counting = True

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of some tensors as nothing; the caller keeps them."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self.now -= self._sizes.get(key, 0)
            self._sizes[key] = 0

    def know(self, tensor: Tensor) -> None:
        """Count a tensor as nothing while it exists, unless it is counted already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._freed, storage._cdata)

    def restart(self) -> int:
        """Forget the peak, and return the bytes that exist now."""
        self.peak = self.now
        return self.now

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count the tensors that operators make inside the block as memory of the host."""
        self._is_on_host = True
        try:
            yield
        finally:
            self._is_on_host = False

    @override
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = self.run(function, args, kwargs or {})
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and (self._counts_meta or not result.is_meta):
                self._count(result)
        return results

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator."""
        return function(*args, **kwargs)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // self._multiple) * self._multiple * self.is_counting
        if self._is_on_host:
            self._sizes[key] = 0
            self.host += size
            weakref.finalize(storage, self._freed_on_host, key, size)
            return
        self._sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _freed_on_host(self, key: int, size: int) -> None:
        self._sizes.pop(key)
        self.host -= size
