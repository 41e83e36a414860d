"""Construction of a mesh's process groups: each distinct group once, in one order on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import wraps
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
from lightning_megatron.plan.layout import ParallelLayout

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
#: Number of group numbers that are reserved for one mesh.
_GROUPS = 2**32
#: Number of mesh numbers that are reserved for the layouts with the same first rank.
_MESHES = 2**32


def rank_lists(layout: ParallelLayout) -> dict[str, list[list[int]]]:
    """Return the ranks of every group of a layout, by axis; only ``checkpoint_cpu`` is missing."""
    lists = {
        "world": [list(range(layout.rank_offset, layout.rank_offset + layout.world_size))],
        "tp": layout.groups("tp"),
        "cp": layout.groups("cp"),
        "dp": layout.groups("dp"),
        "pp": layout.groups("pp"),
        "data": layout.groups("dp-cp"),
        "model": layout.groups("tp-pp"),
        "embedding": layout.embedding_groups(),
        "position_embedding": layout.position_embedding_groups(),
        "etp": layout.expert_groups("etp"),
        "ep": layout.expert_groups("ep"),
        "edp": layout.expert_groups("edp"),
    }
    on_cpu = {f"{name}_cpu": lists[name] for name in GROUP_NAMES}
    return {**lists, **on_cpu, "experts_cpu": layout.expert_groups("etp-ep")}


class GroupBuilder:
    """Builder of the mesh's groups: each distinct group once, in the same order on every rank."""

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
        self.ranks = list(range(self.rank, self.rank + layout.world_size))
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

    def axes(self) -> dict[str, MeshAxis]:
        """Create every axis of the mesh, by field name."""
        axes = {
            name: self._axis(name, groups, "gloo" if name.endswith("_cpu") else self.backend)
            for name, groups in rank_lists(self.layout).items()
        }
        axes["checkpoint_cpu"] = self._checkpoint_axis()
        return axes

    def _checkpoint_axis(self) -> MeshAxis:
        """Create a separate group of all ranks that is not counted and waits for slow disks."""
        ranks = self.ranks
        if len(ranks) == 1:
            return MeshAxis("checkpoint_cpu", (self.rank,))
        longest = max(self.timeout or CHECKPOINT_TIMEOUT, CHECKPOINT_TIMEOUT)
        group = dist.new_group(ranks, timeout=longest, backend="gloo")
        self.created.append(group)
        return MeshAxis("checkpoint_cpu", tuple(ranks), ranks.index(self.rank), group)

    def _axis(self, name: str, groups: Sequence[Sequence[int]], backend: str) -> MeshAxis:
        options = self.options.get(name, {}) if backend == "nccl" else {}
        # The messages of one group queue on one stream. cp often has the ranks of data, and its
        # layers would wait behind the gradients and parameters in flight on the data axis.
        key = (backend, tuple(map(tuple, groups)), tuple(sorted(options.items())), name == "cp")
        if key not in self._cache:
            self._cache[key] = self._create(groups, backend, options)
        axis = self._cache[key]
        return replace(axis, name=name, journal=self.journal, launcher=self.launcher)

    def _create(
        self, groups: Sequence[Sequence[int]], backend: str, options: Mapping[str, Any]
    ) -> MeshAxis:
        # A rank outside of all groups gets a group of one rank, such as a middle stage, which is
        # not in the embedding group.
        axis = MeshAxis("", (self.rank,), 0, None)
        for ranks in groups:
            if len(ranks) == 1:
                continue
            only_nccl: dict[str, Any] = {}
            if backend == "nccl":
                only_nccl = {"pg_options": torch_options(options), "device_id": self.device}
            group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend, **only_nccl)
            if self.rank in ranks:
                axis = MeshAxis("", tuple(ranks), list(ranks).index(self.rank), group)
                self.created.append(group)
        return axis


@contextmanager
def groups_of_part(rank_offset: int, number: int) -> Iterator[None]:
    """Let ``new_group`` run on the ranks of one layout only.

    Every rank numbers its groups by itself, and torch uses these numbers as names in the shared
    store. torch also splits NCCL communicators from that of all ranks, which requires all ranks to
    take part. Inside this context, the numbers are unique to this layout and mesh, and torch
    creates communicators from scratch.
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
