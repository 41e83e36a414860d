"""Process groups of one rank, built once from a layout and passed on as an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from lightning_megatron.errors import ParallelPlanError, RankMismatchError
from lightning_megatron.groups.agent_store import default_store
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collective_matmul import release_workspace
from lightning_megatron.groups.fingerprint import check_same_in_store
from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.launcher import CollectiveLauncher
from lightning_megatron.groups.nccl_options import (
    GROUP_NAMES,
    NcclOptions,
    read_nccl_options,
    torch_options,
)
from lightning_megatron.groups.part_of_world import groups_of_part
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.sources import own_sources
from lightning_megatron.plan.layout import ParallelLayout

#: Default time that a collective may wait for a rank, by the device of its tensors.
DEFAULT_TIMEOUTS = {
    "cpu": default_pg_timeout,
    "cuda": default_pg_nccl_timeout or default_pg_timeout,
}
#: Time that the ranks wait for each other in a save; one may have much more to write, to a slow
#: disk.
CHECKPOINT_TIMEOUT = timedelta(hours=2)
#: Axes whose small messages must not queue behind large ones on a GPU.
_HIGH_PRIORITY = ("pp", "ep")


@dataclass(frozen=True)
class Rendezvous:
    """Address at which the processes of a job meet.

    Args:
        address: Host name of rank 0.
        port: Free TCP port on that host.
        rank: Global rank of this process.
    """

    address: str
    port: int
    rank: int


@dataclass(frozen=True)
class ParallelMesh:
    """All groups of this rank, its device and its random streams.

    Axes of one rank have no process group and never communicate. ``data`` is dp x cp, the group
    that averages dense gradients. ``model`` is tp x pp, the ranks that together hold one copy of
    the model. ``embedding`` joins the first stage and the one that computes the loss.

    The axes that end in ``_cpu`` are gloo groups of the same ranks for Python objects and CPU
    tensors; :meth:`on_cpu` finds them by name. ``experts_cpu`` joins the ranks that together hold
    all experts of a stage (etp x ep). ``checkpoint_cpu`` contains all ranks and is reserved for a
    thread that saves checkpoints during training.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    random: RandomStreams
    sequence_parallel: bool = False
    world: MeshAxis = MeshAxis("world")
    tp: MeshAxis = MeshAxis("tp")
    cp: MeshAxis = MeshAxis("cp")
    dp: MeshAxis = MeshAxis("dp")
    pp: MeshAxis = MeshAxis("pp")
    data: MeshAxis = MeshAxis("data")
    model: MeshAxis = MeshAxis("model")
    embedding: MeshAxis = MeshAxis("embedding")
    position_embedding: MeshAxis = MeshAxis("position_embedding")
    etp: MeshAxis = MeshAxis("etp")
    ep: MeshAxis = MeshAxis("ep")
    edp: MeshAxis = MeshAxis("edp")
    world_cpu: MeshAxis = MeshAxis("world_cpu")
    tp_cpu: MeshAxis = MeshAxis("tp_cpu")
    cp_cpu: MeshAxis = MeshAxis("cp_cpu")
    dp_cpu: MeshAxis = MeshAxis("dp_cpu")
    pp_cpu: MeshAxis = MeshAxis("pp_cpu")
    data_cpu: MeshAxis = MeshAxis("data_cpu")
    model_cpu: MeshAxis = MeshAxis("model_cpu")
    embedding_cpu: MeshAxis = MeshAxis("embedding_cpu")
    position_embedding_cpu: MeshAxis = MeshAxis("position_embedding_cpu")
    etp_cpu: MeshAxis = MeshAxis("etp_cpu")
    ep_cpu: MeshAxis = MeshAxis("ep_cpu")
    edp_cpu: MeshAxis = MeshAxis("edp_cpu")
    experts_cpu: MeshAxis = MeshAxis("experts_cpu")
    checkpoint_cpu: MeshAxis = MeshAxis("checkpoint_cpu")
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)
    launcher: CollectiveLauncher = field(
        default_factory=CollectiveLauncher, repr=False, compare=False
    )
    owned_groups: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False, compare=False)
    owns_world: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def single(cls, device: str | torch.device = "cpu", seed: int = 0) -> ParallelMesh:
        """Return the mesh of a single process without any process group.

        Args:
            device: Device of the model.
            seed: Seed of the random streams.
        """
        return cls(ParallelLayout(1), 0, torch.device(device), RandomStreams(seed, device=device))

    @classmethod
    def create(
        cls,
        layout: ParallelLayout,
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        sequence_parallel: bool = False,
        rendezvous: Rendezvous | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        options: NcclOptions | str | None = None,
        overlaps_matmul: bool = False,
    ) -> ParallelMesh:
        """Create the groups of a layout; all its ranks must call this with the same layout.

        A process group that already exists is used, and :meth:`destroy` keeps it. It may have more
        ranks than the layout, whose first rank is then ``rank_offset``. The other ranks need not
        call this, or have layouts of their own.

        Args:
            layout: Sizes and order of the axes.
            device: Device of this rank; a CUDA device becomes the current one.
            seed: Seed of the random streams, equal on all ranks.
            sequence_parallel: Whether to shard activations along the sequence between
                tensor-parallel regions.
            rendezvous: Address at which the ranks meet; not needed if a process group already
                exists.
            backend: ``nccl`` or ``gloo``; None chooses by the device.
            timeout: Time that a collective may wait for a rank before the job fails; None means
                torch's default.
            options: NCCL settings by axis, such as ``{"pp": {"max_ctas": 4}}``, or the path of a
                YAML file with such a mapping; see
                :func:`~lightning_megatron.groups.nccl_options.read_nccl_options`.
            overlaps_matmul: Whether to overlap matrix products at the border of tensor-parallel
                regions with their communication, where ``groups.collective_matmul`` supports it.

        Raises:
            ParallelPlanError: If the existing process group has fewer ranks than the layout needs,
                or this rank is not in the layout.
            RankMismatchError: On every rank, if the ranks have different layouts.

        Communication: creation of process groups, a collective over all ranks of the layout.
        """
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        builder = _Builder(layout, device, backend, timeout, options)
        owns_world = builder.join(rendezvous, timeout)
        # Ranks with different layouts would wait for each other while they create groups.
        number = builder.compare(sequence_parallel)
        with groups_of_part(layout.rank_offset, number) if builder.is_part else nullcontext():
            axes = builder.axes()
        axes["tp"] = replace(axes["tp"], overlaps_matmul=overlaps_matmul)
        where = layout.coordinates(builder.rank)
        experts = layout.expert_coordinates(builder.rank)
        random = RandomStreams(
            seed,
            tp=where["tp"],
            cp=where["cp"],
            ep=experts["ep"],
            etp=experts["etp"],
            device=device,
        )
        return cls(
            layout,
            builder.rank,
            device,
            random,
            sequence_parallel and layout.tp > 1,
            **axes,
            journal=builder.journal,
            launcher=builder.launcher,
            owned_groups=tuple(builder.created),
            owns_world=owns_world,
        )

    @property
    def has_loss(self) -> bool:
        """Return whether this rank's stage has the last virtual stage, and computes the loss."""
        return self.pp.rank == self.layout.loss_stage

    def copies(self, is_expert: bool) -> MeshAxis:
        """Return the axis of a parameter's replicas: ``edp`` for experts, else ``data``."""
        return self.edp if is_expert else self.data

    def on_cpu(self, name: str) -> MeshAxis:
        """Return the gloo twin of an axis: the same ranks, for Python objects and CPU tensors.

        Args:
            name: Name of the axis, such as ``tp``.

        Raises:
            ParallelPlanError: For a name that is not an axis with a group.
        """
        if name not in GROUP_NAMES:
            raise ParallelPlanError(
                f"name must be an axis of the mesh with a group: {name!r} is not. Use "
                f"{', '.join(GROUP_NAMES)}."
            )
        twin: MeshAxis = getattr(self, f"{name}_cpu")
        return twin

    @property
    def whole_cpu(self) -> MeshAxis:
        """Return the axis of ranks that together have every parameter.

        It is ``model_cpu``, or ``world_cpu`` if ep is above 1.
        """
        return self.model_cpu if self.layout.ep == 1 else self.world_cpu

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMesh:
        """Return the mesh itself: a copied module, such as an average, uses the same groups."""
        return self

    def destroy(self) -> None:
        """Destroy the process groups of this mesh, so that this process can create another mesh."""
        if not dist.is_initialized():
            return
        axes = [one for one in vars(self).values() if isinstance(one, MeshAxis)]
        is_destroyed = [self.owns_world or one.group in self.owned_groups for one in axes]
        self.journal.end(
            one.name for one, is_gone in zip(axes, is_destroyed, strict=True) if is_gone
        )
        release_workspace(self.tp)
        self.ep.peer_memory.release()
        if self.owns_world:
            dist.destroy_process_group()
            return
        for group in self.owned_groups:
            dist.destroy_process_group(group)


class _Builder:
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
        given = read_nccl_options(options)
        self.options = {
            name: {"high_priority": name in _HIGH_PRIORITY, **given.get(name, {})}
            for name in GROUP_NAMES
        }
        self.created: list[dist.ProcessGroup] = []
        self.rank = layout.rank_offset
        self.is_part = False
        self.journal = Journal()
        self.launcher = CollectiveLauncher()
        self._cache: dict[Any, MeshAxis] = {}

    def join(self, rendezvous: Rendezvous | None, timeout: timedelta | None) -> bool:
        """Initialise the process group if there is none, and return whether this call did."""
        if dist.is_initialized():
            self._check_world()
            self.rank = dist.get_rank()
            return False
        if self.layout.world_size == 1:
            return False
        if rendezvous is None:
            raise RankMismatchError(
                f"a layout of {self.layout.world_size} ranks needs a process group: none is "
                "initialised and no rendezvous is given. Pass rendezvous=, or call "
                "torch.distributed.init_process_group first."
            )
        self.rank = rendezvous.rank
        dist.init_process_group(
            self.backend,
            init_method=f"tcp://{rendezvous.address}:{rendezvous.port}",
            rank=rendezvous.rank,
            world_size=self.layout.world_size,
            timeout=timeout,
            device_id=self.device if self.backend == "nccl" else None,
        )
        return True

    def _check_world(self) -> None:
        found = dist.get_world_size()
        wanted = self.layout.world_size + self.layout.rank_offset
        if found < wanted:
            raise ParallelPlanError(
                f"the initialised process group has {found} ranks, the layout needs {wanted}. "
                f"Start {wanted} processes or change the layout."
            )
        (ranks,) = self._all_ranks()
        rank = dist.get_rank()
        if rank not in ranks:
            raise ParallelPlanError(
                f"a layout must contain the rank that creates its groups: rank {rank} is not in "
                f"{ranks[0]} to {ranks[-1]}. Give this rank a layout with its own rank_offset, or "
                f"all {found} ranks a larger layout."
            )
        self.is_part = found != self.layout.world_size

    def compare(self, sequence_parallel: bool) -> int:
        """Compare the layout and the package over all ranks of the layout before it has groups.

        Returns:
            The number of comparisons that this rank has started before.
        """
        (ranks,) = self._all_ranks()
        if len(ranks) > 1:
            fields = asdict(self.layout) | {"sequence_parallel": sequence_parallel}
            fields |= {"options": repr(self.options), "lightning-megatron sources": own_sources()}
            patience = max(self.timeout or DEFAULT_TIMEOUTS["cpu"], DEFAULT_TIMEOUTS["cpu"])
            return check_same_in_store(default_store(), self.rank, ranks, fields, patience)
        return 0

    def _all_ranks(self) -> list[list[int]]:
        return [[self.layout.rank_offset + i for i in range(self.layout.world_size)]]

    def axes(self) -> dict[str, MeshAxis]:
        """Create every axis of the mesh; return them by field name."""
        layout = self.layout
        lists = {
            "world": self._all_ranks(),
            **{name: layout.groups(name) for name in ("tp", "cp", "dp", "pp")},
            "data": layout.groups("dp-cp"),
            "model": layout.groups("tp-pp"),
            "embedding": layout.embedding_groups(),
            "position_embedding": layout.position_embedding_groups(),
            **{name: layout.expert_groups(name) for name in ("etp", "ep", "edp")},
        }
        axes = {name: self._axis(name, groups, self.backend) for name, groups in lists.items()}
        for name in GROUP_NAMES:
            axes[f"{name}_cpu"] = self._axis(f"{name}_cpu", lists[name], "gloo")
        axes["experts_cpu"] = self._axis("experts_cpu", layout.expert_groups("etp-ep"), "gloo")
        axes["checkpoint_cpu"] = self._checkpoint_axis()
        return axes

    def _checkpoint_axis(self) -> MeshAxis:
        """Create a separate group of all ranks that is not counted and waits for slow disks."""
        ranks = self._all_ranks()[0]
        if len(ranks) == 1:
            return MeshAxis("checkpoint_cpu", (self.rank,))
        longest = max(self.timeout or CHECKPOINT_TIMEOUT, CHECKPOINT_TIMEOUT)
        group = dist.new_group(ranks, timeout=longest, backend="gloo")
        self.created.append(group)
        return MeshAxis("checkpoint_cpu", tuple(ranks), ranks.index(self.rank), group)

    def _axis(self, name: str, groups: Sequence[Sequence[int]], backend: str) -> MeshAxis:
        options = self.options.get(name, {}) if backend == "nccl" else {}
        key = (backend, tuple(map(tuple, groups)), tuple(sorted(options.items())))
        if key not in self._cache:
            self._cache[key] = self._create(groups, backend, options)
        one = self._cache[key]
        return replace(one, name=name, journal=self.journal, launcher=self.launcher)

    def _create(
        self, groups: Sequence[Sequence[int]], backend: str, options: Mapping[str, Any]
    ) -> MeshAxis:
        # A rank outside every group, such as a middle stage and the embedding group, gets a group
        # of one rank.
        mine = MeshAxis("", (self.rank,), 0, None)
        for ranks in groups:
            if len(ranks) == 1:
                continue
            group = self._new_group(ranks, backend, options)
            if self.rank in ranks:
                mine = MeshAxis("", tuple(ranks), list(ranks).index(self.rank), group)
                self.created.append(group)
        return mine

    def _new_group(
        self, ranks: Sequence[int], backend: str, options: Mapping[str, Any]
    ) -> dist.ProcessGroup:
        only_nccl: dict[str, Any] = {}
        if backend == "nccl":
            only_nccl = {"pg_options": torch_options(options), "device_id": self.device}
        return dist.new_group(list(ranks), timeout=self.timeout, backend=backend, **only_nccl)
