"""Transfer of a sharded module to new process groups of the same layout."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.stage import named_layers

_ATTRIBUTE = "mesh"


def rejoin(root: nn.Module, mesh: ParallelMesh) -> None:
    """Move blocks that were sharded on an earlier mesh to the groups of a new mesh.

    A second fit of a module creates new process groups. The shards remain valid if the layout is
    the same.

    Raises:
        UnsupportedError: If a block was sharded for another layout.
    """
    cut_before = [(name, module) for name, module in named_layers(root) if _was_cut(module, mesh)]
    for name, module in cut_before:
        old = _mesh_of(module)
        if (old.layout, old.rank) != (mesh.layout, mesh.rank):
            raise UnsupportedError(
                f"{name!r} is already cut for another layout ({old.layout}), so its weights cannot "
                f"be cut for this one ({mesh.layout}). Build the module again, and load its "
                "weights from a checkpoint."
            )
    for _, module in cut_before:
        sequence_parallel = _mesh_of(module).sequence_parallel
        same = sequence_parallel == mesh.sequence_parallel
        setattr(
            module, _ATTRIBUTE, mesh if same else replace(mesh, sequence_parallel=sequence_parallel)
        )


def _mesh_of(module: nn.Module) -> ParallelMesh:
    mesh = getattr(module, _ATTRIBUTE)
    assert isinstance(mesh, ParallelMesh), "only modules of this package keep a mesh"
    return mesh


def _was_cut(module: nn.Module, mesh: ParallelMesh) -> bool:
    # Modules built for one process are not sharded. Meshes with and without sequence parallelism
    # share one set of random streams.
    old = getattr(module, _ATTRIBUTE, None)
    return (
        isinstance(old, ParallelMesh)
        and old.random is not mesh.random
        and old.layout.world_size > 1
    )
