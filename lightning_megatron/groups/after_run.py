"""Communication among the ranks of a mesh after the run, which has destroyed its groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from lightning_megatron.groups.agent_store import default_store
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.fingerprint import check_same_in_store
from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.part_of_world import groups_of_part

#: Time that the ranks wait for each other before they form a group.
_TIMEOUT = timedelta(minutes=2)


@contextmanager
def ranks_on_cpu(mesh: ParallelMesh) -> Iterator[MeshAxis]:
    """Yield the axis of all ranks of a mesh on the CPU, even after its groups have been destroyed.

    After a run, the ranks form a new group, which is destroyed when the block ends.

    Args:
        mesh: Mesh of this rank.

    Raises:
        RankMismatchError: If other ranks do not enter the block within two minutes.

    Communication: after the run, one comparison through the store and the creation of a group. All
        ranks of the mesh must enter the block.
    """
    world = mesh.world_cpu
    if world.group is None or _is_registered(world.group):
        yield world
        return
    number = check_same_in_store(
        default_store(), world.ranks[world.rank], world.ranks, {}, _TIMEOUT
    )
    is_part = world.size != dist.get_world_size()
    with groups_of_part(world.ranks[0], number) if is_part else nullcontext():
        group = dist.new_group(list(world.ranks), backend="gloo")
    try:
        yield replace(world, group=group, journal=Journal())
    finally:
        dist.destroy_process_group(group)


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True
