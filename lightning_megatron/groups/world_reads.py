"""Notice of user code that asks torch for the number of all processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import torch.distributed as dist


def watch_world_size(note: Callable[[FrameType], None]) -> Callable[[], None]:
    """Call a function whenever ``torch.distributed.get_world_size()`` is called without a group.

    Args:
        note: Function of the frame that calls it.

    Returns:
        Function that ends the watch.
    """
    original = dist.get_world_size

    @wraps(original)
    def get_world_size(group: Any | None = None) -> int:
        if group is None:
            note(sys._getframe(1))
        return original(group)

    dist.get_world_size = get_world_size

    def end() -> None:
        dist.get_world_size = original

    return end
