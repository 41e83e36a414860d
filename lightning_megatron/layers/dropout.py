"""Dropout whose masks agree where activations are replicated and differ where they are cut."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh


def hidden_dropout(hidden: Tensor, probability: float, training: bool, mesh: ParallelMesh) -> Tensor:
    """Drop elements of the residual stream.

    Every tensor-parallel rank holds the same activations and must drop the same elements, unless sequence parallelism
    gives each rank its own positions. torch's default generators are left as they were.

    Shapes: ``(S, B, D)`` or, under sequence parallelism, ``(S/tp, B, D)``; output the same.

    Args:
        hidden: The activations.
        probability: How likely an element is dropped.
        training: Whether anything is dropped at all.
        mesh: The groups and random streams of this rank.

    Source: Shoeybi et al. 2019, appendix B.2.
    """
    if not training or probability == 0.0:
        return hidden
    with mesh.random.fork("tensor" if mesh.sequence_parallel else "replicated"):
        return F.dropout(hidden, probability, training=True)


def tensor_region_stream(probability: float, training: bool, mesh: ParallelMesh) -> AbstractContextManager[None]:
    """Open the stream for dropout inside a tensor-parallel region, where ranks hold different heads or features.

    Nothing is opened when nothing will be dropped.
    """
    return mesh.random.fork("tensor") if training and probability > 0.0 else nullcontext()
