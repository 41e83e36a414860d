"""Table of the settings of an optimizer's groups, in device memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.shapes import Float

# Rows of 12 float32 numbers have equal alignment, so that one compiled kernel can read all groups.
_COLUMNS = 12


class GroupNumbers:
    """Device table with one row of numbers for each group of an optimizer.

    A captured update reads the table at each replay, so that learning rates and other settings may
    change between steps. The table keeps its address while the number of groups does not change.

    Args:
        device: Device of the optimizer's parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: list[tuple[float, ...]] = []
        self._table = torch.empty(0, _COLUMNS, device=device)
        #: Row of each group.
        self.rows: tuple[Float[Tensor, "12"], ...] = ()

    def fill(self, groups: Sequence[Mapping[str, Any]], are_decoupled: Sequence[bool]) -> None:
        """Write the numbers of the groups in one copy, for which the host does not wait.

        Args:
            groups: The optimizer's groups.
            are_decoupled: Whether the weight decay of each group shrinks the parameters (AdamW).
        """
        values = list(map(numbers_of, groups, are_decoupled))
        if values == self._values:
            return
        if len(values) != len(self._values):
            self._table = torch.empty(len(values), _COLUMNS, device=self._device)
            self.rows = self._table.unbind()
        self._values = values
        # torch reuses pinned memory only after copies from it are complete, so a later step cannot
        # overwrite numbers that are still being copied.
        host = torch.tensor(values, dtype=torch.float32, pin_memory=self._device.type == "cuda")
        self._table.copy_(host, non_blocking=True)


def numbers_of(group: Mapping[str, Any], is_decoupled: bool) -> tuple[float, ...]:
    """Return the numbers that an Adam step of a group reads, in the order of its kernel.

    They are the learning rate; the logarithms of both decay rates of moments (betas), each as a sum
    of two float32 numbers; the first beta and 1 minus it; the second beta and 1 minus it; eps; the
    factor of the weight decay; 0.

    Args:
        group: Group of the optimizer.
        is_decoupled: Whether the weight decay shrinks the parameters (AdamW).
    """
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    decay = float(group["weight_decay"])
    return (
        lr,
        *_two_floats(_log(beta1)),
        *_two_floats(_log(beta2)),
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        float(group["eps"]),
        lr * decay if is_decoupled else decay,
        0.0,
    )


def _log(beta: float) -> float:
    # The logarithm of 0 is replaced by a number whose exponential is 0 in float64.
    return math.log(beta) if beta > 0.0 else -1e30


def _two_floats(value: float) -> tuple[float, float]:
    """Split a float64 number into a sum of two float32 numbers, the type of the table."""
    high = struct.unpack("f", struct.pack("f", value))[0]
    return high, value - high
