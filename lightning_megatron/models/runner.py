"""Interface through which another room runs the chunks of a model."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_megatron.layers.segments import SegmentList


class ChunkRunner(Protocol):
    """Runner of the segments of a chunk, in place of the list itself."""

    def run(
        self,
        chunk: int,
        segments: SegmentList,
        values: tuple[Any, ...],
        is_last: bool,
        is_training: bool,
    ) -> tuple[Any, ...]:
        """Run a chunk; equal to ``segments(values)``, gradients included.

        Args:
            chunk: Index of this rank's chunk.
            segments: Segments of the chunk; the same list in every call.
            values: Input values of the list.
            is_last: Whether the model returns the outputs to its caller.
            is_training: Whether the model is in training mode.
        """
