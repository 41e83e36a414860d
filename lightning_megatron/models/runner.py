"""Interface of an object that runs the chunks of a model."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_megatron.layers.segments import SegmentList


class ChunkRunner(Protocol):
    """Runner of the segments of a chunk, such as one that replays CUDA graphs."""

    def run(
        self,
        chunk: int,
        segments: SegmentList,
        values: tuple[Any, ...],
        is_last: bool,
        is_training: bool,
    ) -> tuple[Any, ...]:
        """Run a chunk. Outputs and gradients equal those of ``segments(values)``.

        Args:
            chunk: Index of this rank's chunk.
            segments: Segments of the chunk; the same list in every call.
            values: Inputs of the segments.
            is_last: Whether the chunk is the last virtual stage, whose outputs the model returns.
            is_training: Whether the model is in training mode.
        """
