"""The memory of live tensors, followed from operator to operator."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follow the bytes of all tensors that operators make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def leave_out(self, tensors: list[Tensor]) -> None:
        self.sizes.update({tensor.untyped_storage()._cdata: 0 for tensor in tensors})

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if not isinstance(result, Tensor) or result.is_meta:
                continue
            if result.untyped_storage()._cdata not in self.sizes:
                storage = result.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return results

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
