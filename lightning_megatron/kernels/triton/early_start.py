"""Kernels of captured passes over single tokens that start before the previous kernel has ended.

Such a kernel first allows the next kernel to start, then reads what no earlier kernel of the graph
writes, such as stored weights. It then waits for the previous kernel, and only then reads and
writes other memory. The previous kernel has waited, too, so all kernels before it have ended. A
kernel that starts early finds room, because the previous one allows it only when all of its own
programs run.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def early_start(seq_length: int | None) -> dict[str, bool]:
    """Return the options of a launch on the current device, of which ``EARLY`` is a kernel's own.

    Only passes over one token of each row that a CUDA graph captures start kernels early.

    Args:
        seq_length: Number of tokens of each row; None if the kernel must not start early (tokens).
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
    """Allow the next kernel to start, and wait for the results of the previous one.

    Args:
        EARLY: Whether the kernel was launched to start early.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
