"""Dropout with equal masks for replicated activations and different masks for sharded ones."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.shapes import Float


def hidden_dropout(
    hidden: Float[Tensor, "*shape"],
    probability: float,
    training: bool,
    mesh: ParallelMesh,
) -> Float[Tensor, "*shape"]:
    """Drop elements of the residual stream.

    All tensor-parallel ranks have the same activations and must drop the same elements. Under
    sequence parallelism, ranks have different positions and draw different masks. The states of
    torch's default generators do not change.

    Args:
        hidden: Activations.
        probability: Probability that an element is dropped.
        training: Whether the module is in training mode; nothing is dropped otherwise.
        mesh: Process groups and random streams of this rank.

    Source: Shoeybi et al. 2019, appendix B.2.
    """
    if not training or probability == 0.0:
        return hidden
    with mesh.random.fork("tensor" if mesh.sequence_parallel else "replicated"):
        return F.dropout(hidden, probability, training=True)


def tensor_region_stream(
    probability: float,
    training: bool,
    mesh: ParallelMesh,
) -> AbstractContextManager[None]:
    """Select the random stream for dropout inside a tensor-parallel region.

    Ranks have different heads or features there, and draw different masks. The stream does not
    change if nothing will be dropped.
    """
    return mesh.random.fork("tensor") if training and probability > 0.0 else nullcontext()
