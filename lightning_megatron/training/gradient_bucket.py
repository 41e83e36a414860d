"""One bucket of a flat gradient buffer, and its reduction over the data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import Pending, start_all_reduce, start_reduce_scatter
from lightning_megatron.shapes import Shaped
from lightning_megatron.training.flat_buffer import FlatBuffer


@dataclass(eq=False)
class GradientBucket:
    """State of one bucket during a step.

    Args:
        buffer: Buffer that contains the bucket.
        index: Number of the bucket in its buffer.
        names: Names of the parameters whose gradients are in the bucket.
        missing: Names of parameters whose gradients are incomplete while the last backward pass
            runs.
        pending: Reduction over the data-parallel ranks, once it has started.
        is_summed: Whether the gradients are already summed over all axes, instead of only over the
            data-parallel ranks.
    """

    buffer: FlatBuffer
    index: int
    names: tuple[str, ...]
    missing: set[str]
    pending: Pending | None = None
    is_summed: bool = False

    @classmethod
    def of(cls, buffer: FlatBuffer, index: int) -> GradientBucket:
        """Return a bucket of a buffer."""
        return cls(
            buffer, index, tuple(placed.name for placed in buffer.plan.buckets[index].placed), set()
        )

    @property
    def group(self) -> int:
        """Return the group of buckets whose gradients are complete at the same time."""
        return self.buffer.plan.buckets[self.index].group

    def start(self, mesh: ParallelMesh, is_whole: bool) -> None:
        """Start to average the gradients over the replicas.

        Args:
            mesh: Process groups of this rank.
            is_whole: Whether every rank gets the full bucket instead of its part.

        Communication: one reduce-scatter over the data axis, or over that of experts; an all-reduce
        if ranks get whole buckets.
        """
        axis = mesh.replica_axis(self.buffer.is_expert)
        buffer = self.buffer
        planned = buffer.plan.buckets[self.index]
        whole = buffer.gradients[planned.start : planned.stop]
        if is_whole or buffer.plan.num_parts == 1:
            self.pending = start_all_reduce(whole, axis, "mean")
        else:
            self.pending = start_reduce_scatter(self.own_part, whole, axis, "mean")

    def wait(self) -> None:
        """Wait for the reduction, if it has started."""
        if self.pending is not None:
            self.pending.wait()

    @property
    def own_part(self) -> Shaped[Tensor, "_"]:
        """Return this rank's part of the gradients."""
        return self.buffer.own_part(self.buffer.gradients, self.index)
