"""Detection of accesses to ``parameter.data``, whose writes torch does not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

#: Torch's own descriptor, to which the replacement forwards.
_ORIGINAL: Any = torch.Tensor.data


def memory_of(parameter: Tensor) -> Tensor:
    """Return ``parameter.data`` without triggering the detection."""
    return _ORIGINAL.__get__(parameter)


def _set(parameter: nn.Parameter, value: Tensor) -> None:
    _ORIGINAL.__set__(parameter, value)


def is_accessor(code: CodeType) -> bool:
    """Return whether a frame's code belongs to this module."""
    return code.co_filename == memory_of.__code__.co_filename


@contextmanager
def record_data_access(note: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call a function with every parameter whose ``data`` is read or assigned inside the block.

    Args:
        note: Function that receives the parameter before each access.
    """
    # Fits may be nested: the inner one restores the replacement of the outer one.
    before: Any = vars(nn.Parameter).get("data")

    def get(parameter: nn.Parameter) -> Tensor:
        note(parameter)
        return memory_of(parameter)

    def replace(parameter: nn.Parameter, value: Tensor) -> None:
        note(parameter)
        _set(parameter, value)

    nn.Parameter.data = property(get, replace)  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del nn.Parameter.data
        else:
            nn.Parameter.data = before
