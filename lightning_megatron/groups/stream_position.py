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
        first_sample: Number of the microbatch's first sample in the batch of all data ranks.
        sample_stride: Distance between the numbers of neighbouring samples.
        num_samples: Samples of the microbatch; 0 if each row is a sample (samples).
    """

    step: int = 0
    microbatch: int = 0
    layer: int = 0
    is_replay: bool = False
    run: int = 0
    first_sample: int = 0
    sample_stride: int = 1
    num_samples: int = 0

    def rows_of_sample(self, num_rows: int) -> int:
        """Return the rows of each sample in a call of the model, whose samples follow one another.

        Args:
            num_rows: Rows of the call (rows).
        """
        is_multiple = self.num_samples > 0 and num_rows % self.num_samples == 0
        return num_rows // self.num_samples if is_multiple else 1
