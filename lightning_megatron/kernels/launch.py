"""What every kernel launch shares: the device, rows of a tensor, sizes of blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, where Triton launches; nothing is done when it already is."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def as_rows(tensor: Tensor) -> Tensor:
    """View a tensor as ``(N, last size)`` with adjacent elements in a row; copies only if no such view exists."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(size: int, part: int) -> int:
    """Return how many parts cover a size, as triton.cdiv does, a call of which costs the host more than a view does."""
    return -(-size // part)
