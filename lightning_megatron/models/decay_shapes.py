"""Shapes of a decay from 1 to 0, for schedules."""

from __future__ import annotations

import math
from typing import Literal

#: A straight line, half a cosine wave, or 1 minus a square root, which falls fastest at its start.
DecayShape = Literal["linear", "cosine", "1-sqrt"]


def decay_factor(shape: DecayShape, done: float) -> float:
    """Return the factor of a decay from 1 to 0.

    It is ``1 - done`` for ``linear``, ``(1 + cos(pi * done)) / 2`` for ``cosine``, and
    ``1 - sqrt(done)`` for ``1-sqrt``.

    Args:
        shape: Shape of the decay.
        done: Completed fraction of the decay, from 0 to 1.
    """
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - (done if shape == "linear" else math.sqrt(done))
