"""Interception of backward passes that user code starts without ``manual_backward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def wrap_backward_passes(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run every backward pass that starts inside the block in a new context.

    The interception covers ``loss.backward()`` and ``torch.autograd.backward(...)``. A nested pass,
    such as that of recomputed activations, runs in the context of the outer pass.

    Args:
        around: Function that returns a context manager for one pass.
    """
    original = torch.autograd.backward
    is_inside = False

    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal is_inside
        if is_inside:
            original(*args, **kwargs)
            return
        is_inside = True
        try:
            with around():
                original(*args, **kwargs)
        finally:
            is_inside = False

    # Tensor.backward looks up this function by name at every call, so the replacement takes effect.
    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
