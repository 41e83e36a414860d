"""Choice of the way of weights and gradients between experts and their clones."""

from __future__ import annotations

from lightning_megatron.experts.compute.cloned_linear import CloneSource
from lightning_megatron.experts.transport.clone_transfer import CloneCollectives
from lightning_megatron.experts.transport.cloning import PlacedClones
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.experts import ChosenTransport


def choose_clone_source(
    mesh: ParallelMesh, transport: ChosenTransport, clones: PlacedClones
) -> CloneSource:
    """Choose the way of weights to the clones of a microbatch, and of their gradients back.

    Args:
        mesh: The groups of this rank.
        transport: Transport of the layer's tokens over ep.
        clones: The clones of the microbatch.
    """
    return CloneCollectives(mesh.ep, clones)
