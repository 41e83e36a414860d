"""Transfer of a sharded module to new process groups of the same layout."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.stage import named_layers


def rejoin(root: nn.Module, mesh: ParallelMesh) -> None:
    """Move modules that were sharded in an earlier run to the process groups of this run.

    A second fit of a module creates new process groups. The shards remain valid if the layout and
    the rank are the same.

    Args:
        root: Module that may contain sharded modules.
        mesh: Process groups of this run.

    Raises:
        UnsupportedError: If a module was sharded for another layout or rank; nothing has changed.
    """
    moved: list[tuple[nn.Module, ParallelMesh]] = []
    for name, module in named_layers(root):
        old = vars(module).get("mesh")
        # Meshes with and without sequence parallelism share one set of random streams.
        if not isinstance(old, ParallelMesh) or old.random is mesh.random:
            continue
        # A module that was built for one process has full weights, which are sharded later. For one
        # process on the same device it is moved: an earlier run may have its weights in higher
        # precision.
        if old.layout.world_size == 1 and (old.layout, old.device) != (mesh.layout, mesh.device):
            continue
        if (old.layout, old.rank) != (mesh.layout, mesh.rank):
            raise UnsupportedError(
                "a module can only be used again with the layout that it was sharded for, because "
                f"its weights are parts: {name!r} was sharded for {old.layout} and rank "
                f"{old.rank}, this run has {mesh.layout} and rank {mesh.rank}. Build a new module, "
                "and pass ckpt_path to continue with its weights."
            )
        moved.append((module, old))
    for module, old in moved:
        same = old.sequence_parallel == mesh.sequence_parallel
        new_mesh = mesh if same else replace(mesh, sequence_parallel=old.sequence_parallel)
        setattr(module, "mesh", new_mesh)  # noqa: B010 - a module may have any attribute
