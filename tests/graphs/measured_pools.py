"""A backend that measures the memory of the pools of graphs and does not replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.live_memory import LiveMemory

T = TypeVar("T")


class OwnMemory(LiveMemory):
    """Live memory of the tensors that operators make, without tensors that existed before."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, Tensor) and argument.untyped_storage()._cdata not in self.sizes:
                storage = argument.untyped_storage()
                self.sizes[storage._cdata] = 0
                weakref.finalize(storage, self._freed, storage._cdata)
        return super().__torch_dispatch__(function, types, args, kwargs)


class MeasuredPool:
    """Pool that tracks the memory that its captures allocate and keep."""

    def __init__(self) -> None:
        self.memory = OwnMemory()

    def give_up(self, tensor: Tensor) -> Tensor:
        """Return another tensor, so that the memory of the first is free."""
        return torch.empty_like(tensor)


class MeasuredGraph:
    """Graph that computes nothing."""

    def replay(self) -> None:
        """Do nothing, because the results are those of the capture."""

    def release(self) -> None:
        """Do nothing."""


class MeasuringBackend:
    """Backend whose captures run eagerly, while their pool tracks its live memory."""

    is_capturing = False

    def __init__(self) -> None:
        self.pools: list[MeasuredPool] = []

    @property
    def num_bytes(self) -> int:
        """Return the sum of the peaks of all pools (bytes)."""
        return sum(pool.memory.peak for pool in self.pools)

    def make_pool(self) -> MeasuredPool:
        """Return a new pool."""
        self.pools.append(MeasuredPool())
        return self.pools[-1]

    def capture(
        self, function: Callable[[], T], pool: Any, generators: Any = None
    ) -> tuple[MeasuredGraph, T]:
        """Run a function, and track its allocations."""
        with pool.memory:
            return MeasuredGraph(), function()
