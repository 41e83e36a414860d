"""Placement of virtual stages on the stages of a pipeline, in a loop or in a V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from lightning_megatron.plan.settings import Count, coerce_fields

T = TypeVar("T")

PlacementShape = Literal["loop", "v"]
"""How chunks lie on the stages. "loop": every chunk goes from the first stage to the last. "v": odd
chunks go back from the last stage to the first."""


@dataclass(frozen=True)
class Placement:
    """Stage and chunk of every virtual stage.

    A microbatch passes the virtual stages in order. In a V, chunk 1 of the last stage follows chunk
    0 of the last stage, so that the microbatch stays there, and the first stage has the first
    virtual stage (the embedding) and, with an even number of chunks, the last one (the loss).

    Args:
        num_chunks: Chunks per stage (vpp).

    Raises:
        ParallelPlanError: For sizes below 1 and an unknown shape.
    """

    shape: PlacementShape
    num_stages: Count
    num_chunks: Count

    def __post_init__(self) -> None:
        coerce_fields(self)

    @property
    def num_virtual_stages(self) -> int:
        """Return the number of virtual stages."""
        return self.num_stages * self.num_chunks

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return the position of a stage's chunk in the order in which a microbatch passes them."""
        step = self.num_stages - 1 - rank if self._is_reversed(chunk) else rank
        return chunk * self.num_stages + step

    def owner(self, virtual_stage: int) -> tuple[int, int]:
        """Return the stage and the chunk of a virtual stage."""
        chunk, step = divmod(virtual_stage, self.num_stages)
        rank = self.num_stages - 1 - step if self._is_reversed(chunk) else step
        return rank, chunk

    def chunk_beside(self, rank: int, chunk: int, step: Literal[-1, 1]) -> int | None:
        """Return the chunk of the same stage that is next to a chunk in the order of the layers.

        Args:
            step: -1 for the chunk before it, 1 for the one after it.

        Returns:
            The index of the chunk; None if another stage has it, or if there is none. A stage has
            both chunks only at the turn of a V.
        """
        virtual = self.virtual_stage(rank, chunk) + step
        if not 0 <= virtual < self.num_virtual_stages:
            return None
        owner, neighbour = self.owner(virtual)
        return neighbour if owner == rank else None

    def by_stage(self, values: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        """Return values of the virtual stages as ``values[stage][chunk]``.

        Args:
            values: A value for each virtual stage, in the order in which a microbatch passes them.
        """
        rows = []
        for stage in range(self.num_stages):
            chunks = [self.virtual_stage(stage, chunk) for chunk in range(self.num_chunks)]
            rows.append(tuple(map(values.__getitem__, chunks)))
        return tuple(rows)

    def _is_reversed(self, chunk: int) -> bool:
        return self.shape == "v" and chunk % 2 == 1
