"""Groups of a layout that has only part of the ranks of a job: the others neither know nor wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import distributed_c10d

#: How many groups one mesh, and how many meshes one part of a world, may number.
_GROUPS, _MESHES = 2**32, 2**32


@contextmanager
def groups_of_part(rank_offset: int, number: int) -> Iterator[None]:
    """Let ``new_group`` run on the ranks of one layout alone.

    torch numbers groups on every rank by itself and names them so in the store that all share, and it splits
    communicators of NCCL off the one of all ranks, which all have to join in. Within this context the numbers are ones
    that no other part and no other mesh has, and communicators are made anew.

    Args:
        rank_offset: First rank of the layout, which tells it from the others that exist.
        number: How many meshes the ranks of this layout have made before.
    """
    world = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    count, device = world.group_count, default.bound_device_id
    world.group_count = ((rank_offset + 1) * _MESHES + number) * _GROUPS
    default.bound_device_id = None
    try:
        yield
    finally:
        world.group_count, default.bound_device_id = count, device
