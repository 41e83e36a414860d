"""Process groups of one rank, built once from a layout and passed on as an argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.groups.agent_store import default_store
from lightning_megatron.groups.axis import CollectiveLauncher, MeshAxis
from lightning_megatron.groups.collective_matmul import release_workspace
from lightning_megatron.groups.collectives import merge_objects
from lightning_megatron.groups.fingerprint import check_same_in_store
from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.groups.journal import Journal
from lightning_megatron.groups.mesh_groups import GroupBuilder, MeshGroups
from lightning_megatron.groups.nccl_options import NcclOptions
from lightning_megatron.groups.random import RandomStreams
from lightning_megatron.groups.turns import PassTurns
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.model_shape import LossChunk

#: Time that the ranks wait for each other before they form a group.
_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class ParallelMesh:
    """All groups of this rank, its device and its random streams.

    Axes of one rank have no process group and never communicate. ``data`` is dp x cp, the group
    that averages dense gradients. ``model`` is tp x pp, the ranks that together hold one copy of
    the model. ``embedding`` joins the first stage and the one that computes the loss.

    The axes that end in ``_cpu`` are gloo groups of the same ranks for Python objects and CPU
    tensors. ``experts_cpu`` joins the ranks that together hold all experts of a stage (etp x ep).
    ``checkpoint_cpu`` contains all ranks and is reserved for a thread that saves checkpoints during
    training.

    ``context`` and ``loss_chunk`` are settings that models read when they are built: the transport
    of attention over cp, and the number of tokens whose logits exist at once. The division of
    layers among stages depends on the latter. ``turns`` is None unless the communication of experts
    overlaps with another microbatch.
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
    context: ContextLinks = ContextLinks()
    loss_chunk: LossChunk = None
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)
    launcher: CollectiveLauncher = field(
        default_factory=CollectiveLauncher, repr=False, compare=False
    )
    host_values: HostValues = field(default_factory=HostValues, repr=False, compare=False)
    turns: PassTurns | None = field(default=None, repr=False, compare=False)
    owned_groups: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False, compare=False)

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
        backend: str | None = None,
        timeout: timedelta | None = None,
        options: NcclOptions | str | None = None,
        overlaps_matmul: bool = False,
        context: ContextLinks | None = None,
        loss_chunk: LossChunk = None,
        takes_turns: bool = False,
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
            backend: ``nccl`` or ``gloo``; None chooses by the device.
            timeout: Time that a collective may wait for a rank before the job fails; None means
                torch's default.
            options: NCCL settings by axis, such as ``{"pp": {"max_ctas": 4}}``, or the path of a
                YAML file with such a mapping; see
                :func:`~lightning_megatron.groups.nccl_options.read_nccl_options`.
            overlaps_matmul: Whether to overlap matrix products at the border of tensor-parallel
                regions with their communication, where ``groups.collective_matmul`` supports it.
            context: Transport of attention over cp; None means that each layer chooses it.
            loss_chunk: Number of tokens whose logits exist at once; None means all tokens.
            takes_turns: Whether passes of two microbatches switch where experts communicate.

        Raises:
            ParallelPlanError: If the existing process group has fewer ranks than the layout needs,
                or this rank is not in the layout.
            RankMismatchError: On every rank, if the ranks have different layouts.

        Communication: creation of process groups, a collective over all ranks of the layout.
        """
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        builder = GroupBuilder(layout, device, backend, timeout, options)
        groups = _groups(builder, sequence_parallel, overlaps_matmul)
        random = random_streams(layout, builder.rank, seed, device)
        is_cut = sequence_parallel and layout.tp > 1
        groups |= {"context": context or ContextLinks(), "loss_chunk": loss_chunk}
        if takes_turns:
            groups["turns"] = PassTurns(device)
            for axis in groups.values():
                if isinstance(axis, MeshAxis):
                    axis.peer_memory.forbid("two microbatches would write into it at once")
        return cls(layout, builder.rank, device, random, is_cut, **groups)

    @property
    def has_loss(self) -> bool:
        """Return whether this rank's stage has the last virtual stage, which computes the loss."""
        return self.pp.rank == self.layout.loss_stage

    def replica_axis(self, is_expert: bool) -> MeshAxis:
        """Return the axis of a parameter's replicas: ``edp`` for experts, else ``data``."""
        return self.edp if is_expert else self.data

    def unions_over_model(self, *sets: set[Any]) -> list[set[Any]]:
        """Return the union of each set over the ranks that together have every parameter.

        Communication: one gather of the sets over ep, and one of their unions over tp x pp.
        """
        unions = merge_objects([*sets], self.ep_cpu, _unions)
        return merge_objects(unions, self.model_cpu, _unions)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMesh:
        """Return the mesh itself: a copied module, such as an average, uses the same groups."""
        return self

    def destroy(self) -> None:
        """Destroy the process groups of this mesh, so that this process can create another mesh."""
        if not dist.is_initialized():
            return
        axes = [value for value in vars(self).values() if isinstance(value, MeshAxis)]
        self.journal.end(axis.name for axis in axes if axis.group in self.owned_groups)
        release_workspace(self.tp)
        for axis in axes:
            axis.peer_memory.release()
        for group in self.owned_groups:
            dist.destroy_process_group(group)


def _groups(
    builder: GroupBuilder, sequence_parallel: bool, overlaps_matmul: bool
) -> dict[str, Any]:
    """Create the groups of a layout, and return the fields of the mesh that belong to them."""
    # Ranks with different layouts would wait for each other while they create groups.
    axes = builder.axes(builder.compare(sequence_parallel))
    axes["tp"] = replace(axes["tp"], overlaps_matmul=overlaps_matmul)
    return {
        **axes,
        "journal": builder.journal,
        "launcher": builder.launcher,
        "host_values": HostValues(),
        "owned_groups": tuple(builder.created),
    }


def _unions(ranks: list[list[set[Any]]]) -> list[set[Any]]:
    return [set().union(*sets) for sets in zip(*ranks, strict=True)]


def random_streams(
    layout: ParallelLayout, rank: int, seed: int, device: torch.device
) -> RandomStreams:
    """Return the random streams of a rank."""
    where = layout.coordinates(rank)
    experts = layout.expert_coordinates(rank)
    places = {"tp": where["tp"], "cp": where["cp"], "ep": experts["ep"], "etp": experts["etp"]}
    return RandomStreams(seed, **places, device=device)


@contextmanager
def ranks_on_cpu(mesh: ParallelMesh) -> Iterator[MeshAxis]:
    """Yield the axis of all ranks of a mesh on the CPU, even after its groups have been destroyed.

    After a run, the ranks form a new group, which is destroyed when the block ends.

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
    again = MeshGroups(world.ranks, number).create_on_cpu(
        0, world.ranks, world.ranks[world.rank], None
    )
    try:
        yield replace(again, name=world.name)
    finally:
        for axis in (again, *again.lines):
            dist.destroy_process_group(axis.group)


def _is_registered(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True
