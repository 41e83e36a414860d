"""Random numbers that Python draws on the host, which a replay cannot draw again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_megatron.errors import UnsupportedError


@contextmanager
def refuse_host_draws(device: torch.device) -> Iterator[None]:
    """Refuse draws of the host's generators inside the block, and undo them.

    These are Python's ``random``, the generator of ``numpy.random`` and, on a GPU, torch's
    generator of the CPU.

    Args:
        device: Device of the captured computation, whose own generators may draw.

    Raises:
        UnsupportedError: At the end of the block, if a generator of the host has drawn.
    """
    before = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    of_torch = torch.default_generator.get_state()
    drawn = []
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)
            drawn.append("Python's random")
        if repr(np.random.get_state(legacy=False)) != repr(of_numpy):
            np.random.set_state(of_numpy)
            drawn.append("numpy.random")
        if device.type != "cpu" and not torch.equal(torch.default_generator.get_state(), of_torch):
            torch.default_generator.set_state(of_torch)
            drawn.append("torch's generator of the CPU")
    if drawn:
        raise UnsupportedError(
            f"a captured computation must not draw random numbers on the host: {drawn[0]} has "
            "drawn. A replay runs no Python, so that it would repeat the numbers of the capture. "
            "Draw on the device, as in torch.rand(..., device=self.device), or in the dataset."
        )
