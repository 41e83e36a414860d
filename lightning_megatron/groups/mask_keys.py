"""Keys of dropout masks in memory that the replays of a captured computation read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from lightning_megatron.shapes import Int

#: Integers of a key.
KEY_SIZE = 4


class MaskKeys:
    """Keys of the masks of one captured computation, in the order in which it takes them.

    Args:
        device: Device of the computation.
        size: Number of keys; None creates each one when it is taken, which a capture of a CUDA
            graph does not allow (keys).
    """

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self._device = device
        #: Number of keys that are taken.
        self.num_taken = 0
        self._table = None
        if size and device.type != "cpu":
            self._table = torch.zeros(size, KEY_SIZE, dtype=torch.int64, device=device)
        #: Memory of keys on the CPU. It is written without operators, which a recording of
        #: operators would repeat.
        self._host: list[array[int]] = []

    def take(self, values: Sequence[int] | None) -> Int[torch.Tensor, "4"]:
        """Return the next key.

        Args:
            values: Its values; None inside of a capture, before whose replays :meth:`write` runs.
        """
        self.num_taken += 1
        if self._device.type == "cpu":
            self._host.append(array("q", values or [0] * KEY_SIZE))
            return torch.frombuffer(self._host[-1], dtype=torch.int64)
        if values is not None:
            # On the CPU, as outside of recordings: a recomputation compares the places of tensors.
            return torch.tensor(values, dtype=torch.int64)
        assert self._table is not None, "keys of a capture are counted in an eager run before it"
        return self._table[self.num_taken - 1]

    def write(self, keys: Sequence[Sequence[int]]) -> None:
        """Set the values of all keys before a replay.

        Args:
            keys: Values of each key, in the order in which they were taken.
        """
        for memory, values in zip(self._host, keys, strict=False):
            for index, value in enumerate(values):
                memory[index] = value
        if self._table is not None:
            # The allocator of pinned memory reuses it only after the copy.
            pinned = torch.tensor(keys, dtype=torch.int64).pin_memory()
            self._table[: len(keys)].copy_(pinned, non_blocking=True)
