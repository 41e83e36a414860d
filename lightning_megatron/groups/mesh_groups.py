"""Construction of a mesh's process groups: on each rank only its own, each distinct one once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import wraps
from math import isqrt
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from lightning_megatron.errors import ParallelPlanError, RankMismatchError
from lightning_megatron.groups.agent_store import default_store
from lightning_megatron.groups.axis import CollectiveLauncher, MeshAxis
from lightning_megatron.groups.fingerprint import check_same_in_store, package_hash
from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.nccl_options import (
    GROUP_NAMES,
    NcclOptions,
    read_nccl_options,
    torch_options,
)
from lightning_megatron.plan.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout

#: Default time that a collective may wait for a rank, by the device of its tensors.
DEFAULT_TIMEOUTS = {
    "cpu": default_pg_timeout,
    "cuda": default_pg_nccl_timeout or default_pg_timeout,
}
#: Time that the ranks wait for each other in a save. A rank may have much more to write than
#: others, to a slow disk.
CHECKPOINT_TIMEOUT = timedelta(hours=2)
#: Axes whose messages must not queue behind large ones on a GPU.
_HIGH_PRIORITY = ("cp", "pp", "ep")
#: Largest number of ranks whose NCCL communicators are split from that of all ranks, and whose
#: groups on the CPU have no lines (ranks).
FEW_RANKS = 64
#: Number of ranks, of meshes of the same ranks, and of places in the order of a mesh's groups, for
#: which numbers of groups are reserved.
_RANKS = 2**32
_MESHES = 2**32
_PLACES = 2**16


def groups_of_rank(layout: ParallelLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group of one rank, by axis; only ``checkpoint_cpu`` is missing."""
    first = layout.rank_offset
    dense = layout.dense_grid
    expert = layout.expert_grid
    stages = dense.group_of(rank, ["pp"])
    tied = stages[:1] if layout.loss_stage == 0 else (stages[0], stages[layout.loss_stage])
    groups = {axis: dense.group_of(rank, [axis]) for axis in DENSE_AXES}
    groups |= {axis: expert.group_of(rank, [axis]) for axis in EXPERT_AXES[:-1]}
    groups |= {
        "world": tuple(range(first, first + layout.world_size)),
        "data": dense.group_of(rank, ["dp", "cp"]),
        "model": dense.group_of(rank, ["tp", "pp"]),
        # A middle stage is in no such group, and has a group of one rank.
        "embedding": tied if rank in tied else (rank,),
        "position_embedding": (rank,),
    }
    on_cpu = {f"{name}_cpu": groups[name] for name in GROUP_NAMES}
    return {**groups, **on_cpu, "experts_cpu": expert.group_of(rank, ["etp", "ep"])}


@dataclass(frozen=True)
class MeshGroups:
    """Groups of a mesh, with the numbers by which their ranks find each other in the shared store.

    torch counts groups, so that every rank must create the groups of all ranks. These numbers
    follow from a group's ranks and its place in the mesh.

    Args:
        ranks: Ranks of the layout.
        mesh: Number of this mesh among those of the same ranks.
    """

    ranks: Sequence[int]
    mesh: int

    def create(
        self, place: int, ranks: Sequence[int], *, splits: bool = False, **options: Any
    ) -> dist.ProcessGroup:
        """Create a group.

        Args:
            place: Number of the group among those of one rank.
            splits: Whether torch splits an NCCL communicator from that of all ranks, which must
                then all call this. Otherwise only the ranks of the group call it.
        """
        world = distributed_c10d._world
        default = distributed_c10d._get_default_group()
        count = world.group_count
        device = default.bound_device_id
        job = ((self.ranks[0] + 1) * _RANKS + self.ranks[-1]) * _MESHES + self.mesh
        world.group_count = (job * _PLACES + place) * _RANKS + ranks[0]
        if not splits:
            default.bound_device_id = None
        try:
            return dist.new_group(list(ranks), **options)
        finally:
            world.group_count = count
            default.bound_device_id = device

    def create_on_cpu(
        self, place: int, ranks: tuple[int, ...], rank: int, timeout: timedelta | None
    ) -> MeshAxis:
        """Create a gloo group, and for many ranks the groups of its lines.

        Args:
            place: Number of the group among those of one rank; the next two are those of its lines.
            rank: Global rank of this process.
        """
        index = ranks.index(rank)
        axis = MeshAxis("", ranks, index)
        if len(ranks) == 1:
            return axis
        group = self.create(place, ranks, timeout=timeout, backend="gloo")
        width = _length_of_rows(len(ranks)) if len(ranks) > FEW_RANKS else 1
        if width == 1:
            return replace(axis, group=group)
        row, column = divmod(index, width)
        lines = (ranks[row * width : (row + 1) * width], ranks[column::width])
        across = [
            self.create_on_cpu(place + number, line, rank, timeout)
            for number, line in enumerate(lines, 1)
        ]
        return replace(axis, group=group, lines=tuple(across))


def _length_of_rows(num_ranks: int) -> int:
    """Return the largest divisor up to the square root: sums over lines then take fewest steps."""
    return next(width for width in range(isqrt(num_ranks), 0, -1) if num_ranks % width == 0)


class GroupBuilder:
    """Builder of the groups of this rank in a mesh, each distinct one once."""

    def __init__(
        self,
        layout: ParallelLayout,
        device: torch.device,
        backend: str | None,
        timeout: timedelta | None,
        options: NcclOptions | str | None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.timeout = timeout
        self.backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        by_axis = read_nccl_options(options)
        self.options = {
            name: {"high_priority": name in _HIGH_PRIORITY, **by_axis.get(name, {})}
            for name in GROUP_NAMES
        }
        self.created: list[dist.ProcessGroup] = []
        self.rank = layout.rank_offset
        self.ranks = range(self.rank, self.rank + layout.world_size)
        self.is_part = False
        self.journal = Journal()
        self.launcher = CollectiveLauncher()
        self._cache: dict[Any, MeshAxis] = {}
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self._check_world()
        elif layout.world_size > 1:
            raise RankMismatchError(
                f"a layout of {layout.world_size} ranks needs a process group: none is "
                "initialised. Call torch.distributed.init_process_group first."
            )

    def _check_world(self) -> None:
        world_size = dist.get_world_size()
        needed_ranks = self.layout.world_size + self.layout.rank_offset
        if world_size < needed_ranks:
            raise ParallelPlanError(
                f"the initialised process group has {world_size} ranks, and the layout needs "
                f"{needed_ranks}. Start {needed_ranks} processes, or change the layout."
            )
        if self.rank not in self.ranks:
            raise ParallelPlanError(
                f"a layout must contain the rank that creates its groups: rank {self.rank} is not "
                f"in {self.ranks[0]} to {self.ranks[-1]}. Give this rank a layout with its own "
                f"rank_offset, or all {world_size} ranks a larger layout."
            )
        self.is_part = world_size != self.layout.world_size

    def compare(self, sequence_parallel: bool) -> int:
        """Compare the layout and the package over all ranks of the layout before it has groups.

        The result is the number of comparisons that this rank has started before.
        """
        if len(self.ranks) > 1:
            fields = asdict(self.layout) | {"sequence_parallel": sequence_parallel}
            fields |= {"options": repr(self.options), "lightning-megatron sources": package_hash()}
            patience = max(self.timeout or DEFAULT_TIMEOUTS["cpu"], DEFAULT_TIMEOUTS["cpu"])
            return check_same_in_store(default_store(), self.rank, self.ranks, fields, patience)
        return 0

    def axes(self, number: int) -> dict[str, MeshAxis]:
        """Create every axis of the mesh, by field name.

        Args:
            number: Number of this mesh among those of the same ranks.
        """
        mesh = MeshGroups(self.ranks, number)
        own = groups_of_rank(self.layout, self.rank)
        axes = {
            name: self._axis(mesh, place * 3, name, ranks)
            for place, (name, ranks) in enumerate(own.items())
        }
        # A separate group, which waits for slow disks. A thread uses it, beside what counts and
        # times the collectives of the mesh.
        longest = max(self.timeout or CHECKPOINT_TIMEOUT, CHECKPOINT_TIMEOUT)
        saving = mesh.create_on_cpu(len(own) * 3, own["world"], self.rank, longest)
        axes["checkpoint_cpu"] = self._owned(replace(saving, name="checkpoint_cpu"))
        return axes

    def _axis(self, mesh: MeshGroups, place: int, name: str, ranks: tuple[int, ...]) -> MeshAxis:
        backend = "gloo" if name.endswith("_cpu") else self.backend
        options = self.options.get(name, {}) if backend == "nccl" else {}
        # torch splits a communicator from that of all ranks, which is fast for few ranks. For many,
        # each group would wait for all ranks.
        splits = backend == "nccl" and not self.is_part and len(self.ranks) <= FEW_RANKS
        of_all = (groups_of_rank(self.layout, rank)[name] for rank in self.ranks)
        groups = tuple(dict.fromkeys(of_all)) if splits else (ranks,)
        # The messages of one group queue on one stream. cp often has the ranks of data, and its
        # layers would wait behind the gradients and parameters in flight on the data axis.
        key = (backend, groups, tuple(sorted(options.items())), name == "cp")
        if key not in self._cache:
            if backend == "nccl":
                axis = self._create_nccl(mesh, place, groups, options, splits)
            else:
                axis = mesh.create_on_cpu(place, ranks, self.rank, self.timeout)
            shared = replace(axis, name=name, journal=self.journal, launcher=self.launcher)
            self._cache[key] = self._owned(shared)
        return replace(self._cache[key], name=name, ranks=ranks, rank=ranks.index(self.rank))

    def _owned(self, axis: MeshAxis) -> MeshAxis:
        """Return an axis that the mesh destroys, with lines that are named and counted like it."""
        if axis.group is not None:
            self.created.append(axis.group)
        named = zip(axis.lines, (f"{axis.name} rows", f"{axis.name} columns"), strict=False)
        lines = [
            self._owned(replace(line, name=name, journal=axis.journal, launcher=axis.launcher))
            for line, name in named
        ]
        return replace(axis, lines=tuple(lines))

    def _create_nccl(
        self,
        mesh: MeshGroups,
        place: int,
        groups: Sequence[tuple[int, ...]],
        options: Mapping[str, Any],
        splits: bool,
    ) -> MeshAxis:
        axis = MeshAxis("", (self.rank,))
        for ranks in groups:
            if len(ranks) == 1:
                continue
            group = mesh.create(
                place,
                ranks,
                splits=splits,
                timeout=self.timeout,
                backend="nccl",
                pg_options=torch_options(options),
                device_id=self.device,
            )
            if self.rank in ranks:
                axis = replace(axis, group=group)
        return axis


def watch_world_size(note: Callable[[FrameType], None]) -> Callable[[], None]:
    """Call ``note`` with the caller's frame at each ``get_world_size()`` without a group.

    The result ends the watch.
    """
    original = dist.get_world_size

    @wraps(original)
    def get_world_size(group: Any | None = None) -> int:
        if group is None:
            note(sys._getframe(1))
        return original(group)

    dist.get_world_size = get_world_size

    def end() -> None:
        dist.get_world_size = original

    return end
