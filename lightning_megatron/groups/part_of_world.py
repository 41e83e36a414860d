"""Process groups of a layout with only some of the job's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import distributed_c10d

#: Number of group numbers that are reserved for one mesh.
_GROUPS = 2**32
#: Number of mesh numbers that are reserved for the layouts with the same first rank.
_MESHES = 2**32


@contextmanager
def groups_of_part(rank_offset: int, number: int) -> Iterator[None]:
    """Let ``new_group`` run on the ranks of one layout only.

    Every rank numbers its groups by itself, and torch uses these numbers as names in the shared
    store. torch also splits NCCL communicators from that of all ranks, which requires all ranks to
    take part. Inside this context, the numbers are unique to this layout and mesh, and torch
    creates communicators from scratch.

    Args:
        rank_offset: First rank of the layout, which identifies it among the layouts of the job.
        number: Number of meshes that the ranks of this layout have created before.
    """
    world = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    count = world.group_count
    device = default.bound_device_id
    world.group_count = ((rank_offset + 1) * _MESHES + number) * _GROUPS
    default.bound_device_id = None
    try:
        yield
    finally:
        world.group_count = count
        default.bound_device_id = device
