"""Helpers of kernel launches: the current device, row views and block sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_megatron.shapes import Shaped


def on_device_of(tensor: Shaped[Tensor, "..."]) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current device, on which Triton launches kernels."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def as_rows(tensor: Shaped[Tensor, "... features"]) -> Shaped[Tensor, "rows features"]:
    """Return a tensor as rows with contiguous elements; copy only if needed."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def ceil_div(size: int, part: int) -> int:
    """Return the number of parts that cover a size.

    Equal to triton.cdiv, which takes the host longer than the creation of a view.
    """
    return -(-size // part)
