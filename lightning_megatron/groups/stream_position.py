"""Names of the random streams, and the position in training at which they draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StreamName = Literal["replicated", "tensor", "expert"]


@dataclass(frozen=True)
class StreamPosition:
    """Position in training at which a random stream draws.

    Args:
        step: Optimizer step (steps).
        microbatch: Index of the microbatch within the step, over all data ranks (microbatches).
        layer: Index of the layer in the whole model (layers).
        is_replay: Whether activations are being recomputed. Draws do not depend on it.
        run: Number of earlier runs of the layer in the microbatch; above 0 if a step calls the
            model several times.
    """

    step: int = 0
    microbatch: int = 0
    layer: int = 0
    is_replay: bool = False
    run: int = 0
