"""Entry to and exit from tensor-parallel regions, with or without sequence parallelism."""

from __future__ import annotations

from torch import Tensor

from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    copy_to_axis,
    reduce_from_axis,
    reduce_scatter_sequence,
)
from lightning_megatron.groups.mesh import ParallelMesh


def enter_tensor_region(hidden: Tensor, mesh: ParallelMesh) -> Tensor:
    """Give every tensor-parallel rank the whole sequence.

    Shapes: ``(S, B, D)`` to the same; under sequence parallelism ``(S/tp, B, D)`` to ``(S, B, D)``.
    Communication: backward all-reduce over tp; under sequence parallelism all-gather, backward reduce-scatter.
    """
    return all_gather_sequence(hidden, mesh.tp) if mesh.sequence_parallel else copy_to_axis(hidden, mesh.tp)


def leave_tensor_region(part: Tensor, mesh: ParallelMesh) -> Tensor:
    """Add the parts that the tensor-parallel ranks computed.

    Shapes: ``(S, B, D)`` to the same; under sequence parallelism to ``(S/tp, B, D)``.
    Communication: all-reduce over tp; under sequence parallelism reduce-scatter, backward all-gather.
    """
    return reduce_scatter_sequence(part, mesh.tp) if mesh.sequence_parallel else reduce_from_axis(part, mesh.tp)
