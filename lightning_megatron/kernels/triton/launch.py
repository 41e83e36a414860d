"""Launches of kernels: the current device, row views, block sizes, and early starts.

A kernel of a captured pass over single tokens may start before the previous one has ended. Such a
kernel first allows the next kernel to start, then reads what no earlier kernel of the graph writes,
such as stored weights. It then waits for the previous kernel, and only then reads and writes other
memory. The previous kernel has waited, too, so all kernels before it have ended. A kernel that
starts early finds room, because the previous one allows it only when all of its own programs run.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


def early_start(seq_length: int | None) -> dict[str, bool]:
    """Return a launch's options on the current device, of which ``EARLY`` is a kernel's own.

    Only passes over one token of each row that a CUDA graph captures start kernels early; None as
    the number of tokens forbids it.
    """
    is_early = (
        seq_length == 1
        and torch.cuda.is_available()
        and torch.cuda.is_current_stream_capturing()
        and _can_start_early()
    )
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}


@cache
def _can_start_early() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def wait_early(EARLY: tl.constexpr) -> None:
    """Allow the next kernel to start, and wait for the results of the previous one."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
