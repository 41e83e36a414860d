"""Half-precision dtypes, and the default dtype of new tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Floating-point dtypes of 16 bits.
HALF_TYPES = (torch.float16, torch.bfloat16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give new floating-point tensors a dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
