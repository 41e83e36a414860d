"""Shapes of a decay from 1 to 0."""

from __future__ import annotations

import math
from typing import Literal

#: A straight line, half a cosine wave, or 1 minus a square root, which falls fastest at its start.
DecayShape = Literal["linear", "cosine", "1-sqrt"]


def height(shape: DecayShape, done: float) -> float:
    """Return what is left of a decay from 1 to 0.

    ``linear`` is ``1 - done``, ``cosine`` is ``(1 + cos(pi * done)) / 2``, and ``1-sqrt`` is
    ``1 - sqrt(done)``.

    Args:
        shape: Shape of the decay.
        done: Part of the decay that is over, from 0 to 1.
    """
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - (done if shape == "linear" else math.sqrt(done))
