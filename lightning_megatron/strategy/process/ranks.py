"""Lightning's view of this process: its rank, its device, its launcher and its groups."""

from __future__ import annotations

import logging
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import (
    all_gather_sequence,
    all_reduce_,
    barrier,
    broadcast_object,
    is_world,
)
from lightning_megatron.groups.fingerprint import package_hash
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.mesh_groups import watch_world_size
from lightning_megatron.groups.notices import Notices
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.private.processes import reduce_over_group, utils_rank_zero_only
from lightning_megatron.strategy.process.dataloaders import seed_dataloader
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.hang_watch import HangWatch
from lightning_megatron.strategy.process.launcher import MegatronLauncher
from lightning_megatron.strategy.process.rendezvous import (
    ReservedPort,
    check_backend,
    join_processes,
)
from lightning_megatron.user_code import Line

#: Packages that ask for the number of processes and mean it.
_LIBRARIES = frozenset(
    """
    lightning lightning_fabric lightning_utilities lightning_megatron torch
    torchmetrics transformers peft datasets accelerate
    """.split()
)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


log = logging.getLogger(__name__)


class RankStrategy(ParallelStrategy, ABC):
    """Strategy with one process per device, and answers to Lightning's questions about ranks."""

    def __init__(self, options: StrategyOptions) -> None:
        super().__init__()
        self.options = options
        #: Groups of this rank; without them it communicates only with itself.
        self._mesh: ParallelMesh | None = None
        #: Number of nodes of the job; the Trainer sets it.
        self.num_nodes = 1
        self._failure_watch = FailureWatch(0)
        self._hang_watch: HangWatch | None = None
        #: Port of the job's store, held if this process starts the others.
        self._port = ReservedPort()
        self._shown_rank: int | None = None
        self._is_rank_read = False
        self._is_world_noted = False
        self._end_watch: Callable[[], None] | None = None

    # ---- ranks

    @property
    @override
    def global_rank(self) -> int:
        if self._shown_rank is None:
            return super().global_rank
        self._is_rank_read = True
        return self._shown_rank

    @property
    @override
    def world_size(self) -> int:
        self._note_world(sys._getframe(1))
        return super().world_size

    def _note_world(self, frame: FrameType | None) -> None:
        """Warn, once in a run, of a read of the number of processes by user code."""
        while frame is not None and frame.f_code.co_name == "world_size":
            frame = frame.f_back
        if self._is_world_noted or frame is None or _package_of(frame) in _LIBRARIES:
            return
        layout = self.layout
        if layout.dp == layout.world_size:
            return
        self._is_world_noted = True
        line = Line.of(frame)
        rank_zero_warn(
            f"{line.place} reads the number of processes, {layout.world_size}, in "
            f"{line.text!r}. The number of data-parallel ranks, which "
            f"read different data, is {layout.dp}: {layout.world_size // layout.dp} processes "
            "(tp x pp x cp) share each batch. A learning rate or a number of samples that is "
            "scaled by the number of processes is too large by this factor. Use "
            "trainer.strategy.data_parallel_size, and self.all_gather or trainer.strategy.reduce "
            "in the place of collectives of torch.distributed."
        )

    @contextmanager
    def showing_rank(self, rank: int) -> Iterator[None]:
        """Let user code inside the block see another rank than its own.

        Args:
            rank: Global rank that the Trainer, the module and rank-zero functions show.
        """
        own = self.global_rank
        self._shown_rank = rank
        self._is_rank_read = False
        _set_rank_zero(rank)
        try:
            yield
        except Exception as error:
            if self._is_rank_read and rank != own:
                error.add_note(
                    f"Rank {own} counts as rank {rank} in this step, because it runs the code "
                    f"after the model for the pipeline of that rank. What only rank {rank} has "
                    "created, as in a hook, is missing here: create it on all ranks, or write "
                    "through self.logger."
                )
            raise
        finally:
            self._shown_rank = None
            _set_rank_zero(own)

    @property
    def layout(self) -> ParallelLayout:
        """Return the sizes of all axes; known once the Trainer exists."""
        return ParallelLayout(self.num_nodes * self.num_processes, **self.options.sizes())

    @property
    def mesh(self) -> ParallelMesh:
        """Return the groups of this rank; known while the Trainer runs."""
        if self._mesh is None:
            raise RuntimeError(
                "the mesh must be used while the Trainer runs, from the `setup` hook to the "
                "`teardown` hook: no run is in progress."
            )
        return self._mesh

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None, "the Trainer sets the devices"
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Return the number of processes of this node."""
        return len(self.parallel_devices or [])

    @property
    def is_distributed(self) -> bool:
        """Return True, so that Lightning injects samplers and honours ``sync_dist``."""
        return True

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that read different data."""
        return self.layout.dp

    @property
    def data_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that read different data."""
        return self.layout.coordinates(self.global_rank)["dp"]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def samples_per_microbatch(self, batch_size: int) -> int:
        """Return the samples of a microbatch; the last one of a batch may have fewer.

        Args:
            batch_size: Samples of a batch of one data-parallel rank (samples).
        """
        return self.options.microbatches(self.layout).size_for(batch_size)

    def set_world_ranks(self) -> None:
        """Set the ranks of the cluster environment and of Lightning's rank-zero functions."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _set_rank_zero(self.global_rank)

    # ---- processes

    @override
    def _configure_launcher(self) -> None:
        # Sizes that do not divide raise an error here, inside Trainer(...), before processes exist.
        log.debug("layout: %s", self.layout)
        if self._layer_sync is not None:
            raise UnsupportedError(
                "Trainer(sync_batchnorm=True) cannot be used with this strategy: the statistics of "
                "microbatches and stages would differ from the statistics of the batch. Use norms "
                "without batch statistics, such as GroupNorm."
            )
        check_backend(self.options.job.backend, self.root_device)
        assert self.cluster_environment is not None, "the Trainer sets the cluster environment"
        self._failure_watch = FailureWatch(self.global_rank, self.num_processes)
        self._launcher = MegatronLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            self._failure_watch,
            self._port,
            self.check_run,
            lambda: self.layout.dp,
            self.explain_out_of_memory,
        )

    @abstractmethod
    def explain_out_of_memory(self, error: BaseException) -> str:
        """Return what this rank held when its memory was full, and what would help."""

    @abstractmethod
    def check_run(self, arguments: Mapping[str, Any]) -> None:
        """Check the keyword arguments of fit, validate, test or predict before any launch."""

    def configuration(self) -> dict[str, str | int]:
        """Return the settings that must be equal on all ranks before groups exist, by name."""
        return {**asdict(self.layout), "lightning-megatron sources": package_hash()}

    def join_mesh(self) -> ParallelMesh:
        """Create this rank's groups, agree on the seed, and watch for ranks that fail or hang.

        The process group of all ranks lives as long as the process, as in Lightning's strategies.
        :meth:`leave_mesh` destroys all other groups.

        Communication: collective over all ranks.
        """
        options = self.options
        layout = self.layout
        seed = torch.initial_seed()
        if layout.world_size > 1:
            join_processes(
                self.cluster_environment,
                self.global_rank,
                layout.world_size,
                self.root_device,
                options.job,
                self.configuration(),
                self._port.detach(),
            )
        mesh = ParallelMesh.create(
            layout,
            device=self.root_device,
            seed=seed % 2**63,
            sequence_parallel=options.shards_sequence,
            backend=options.job.backend,
            timeout=options.job.timeout_delta,
            options=options.job.nccl,
            overlaps_matmul=options.linear.overlap,
            context=ContextLinks.of(options.context.transport, layout, self.num_processes),
            loss_chunk=options.loss_chunk,
            takes_turns=options.experts.overlap,
        )
        agreed, job = broadcast_object((seed, uuid.uuid4().hex[:12]), mesh.world_cpu)
        if agreed != seed:
            # The ranks have different seeds: use rank 0's, as ddp uses rank 0's weights.
            torch.manual_seed(agreed)
            mesh.random.seed = agreed % 2**63
        self._mesh = mesh
        if layout.world_size > 1:
            self._watch_ranks(mesh, job)
        self._end_watch = watch_world_size(self._note_world)
        return mesh

    def _watch_ranks(self, mesh: ParallelMesh, job: str) -> None:
        """Start watching for ranks that fail or hang; only while the launcher guards the run."""
        notices = Notices(job) if self.num_nodes > 1 else None
        folder = self._failure_watch.join_job(job, notices, self.num_nodes)
        if folder is not None:
            self._hang_watch = HangWatch(
                mesh,
                self.options.job.timeout_delta,
                folder,
                notices,
                self._failure_watch,
                self.lightning_module,
            )
            self._hang_watch.start()

    def leave_mesh(self) -> None:
        """Destroy the process groups of this run."""
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None
        if self._hang_watch is not None:
            self._hang_watch.stop()
            self._hang_watch = None
        # A failed rank must not wait for the others here; the end of the process closes everything.
        if self._mesh is not None and not self._failure_watch.has_failed:
            self._mesh.destroy()
        self._mesh = None

    @contextmanager
    def temporary_mesh(self) -> Iterator[ParallelMesh]:
        """Return the mesh of the run, or after its end a temporary one for the block."""
        if self._mesh is not None:
            yield self._mesh
            return
        try:
            yield self.join_mesh()
        finally:
            self.leave_mesh()

    # ---- communication on the groups of the mesh

    @property
    @abstractmethod
    def is_in_stage(self) -> bool:
        """Return whether a step of several stages is running; stages do not run it in lockstep."""

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; inside a pipelined step, for the ranks of this stage."""
        if self._mesh is not None:
            barrier(self._mesh.data_cpu if self.is_in_stage else self._mesh.world_cpu)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a rank's object; inside a pipelined step, that of this stage's rank with its data.

        Args:
            src: Global rank of the sender. Inside a pipelined step, the sender is the rank of this
                stage with the same dp coordinate.

        Communication: one broadcast on the CPU over the world, or over the data ranks of the stage.
        """
        if self._mesh is None:
            return obj
        if self.is_in_stage:
            return broadcast_object(
                obj, self._mesh.dp_cpu, self._mesh.layout.coordinates(src)["dp"]
            )
        return broadcast_object(obj, self._mesh.world_cpu, src)

    def _axis_of(self, group: Any | None) -> MeshAxis | None:
        """Return the axis for a group, if any: the world group stands for the data axis."""
        if group is None or is_world(group):
            return self._mesh.dp if self._mesh is not None else None
        return group if isinstance(group, MeshAxis) else None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the ranks that read different data, in place, unless a group is given.

        Ranks of one tensor or pipeline group have the same value, which must count once.

        Args:
            tensor: Tensor to reduce; any other value is returned unchanged.
            group: :class:`MeshAxis` or process group. None and the world group select the data
                axis.

        Communication: one all-reduce over the axis or the group.
        """
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        axis = self._axis_of(group)
        if axis is None:
            return reduce_over_group(tensor, group, reduce_op)
        op = str(reduce_op or "sum").rpartition(".")[2].lower().replace("avg", "mean")
        if op == "mean" and not tensor.is_floating_point():
            return tensor.copy_(all_reduce_(tensor, axis, "sum") / axis.size)
        return all_reduce_(tensor, axis, op)  # type: ignore[arg-type]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._mesh is None:
            return decision
        vote = torch.tensor(int(decision))
        axis = self._mesh.data_cpu if self.is_in_stage else self._mesh.world_cpu
        return bool(all_reduce_(vote, axis, "min" if all else "max"))

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Stack a tensor over the ranks that read different data, along a new first dimension.

        The result equals that of ``ddp`` on the data ranks alone, even if only the last stage of a
        pipeline calls this method. A single process returns the tensor unchanged.

        Args:
            group: :class:`MeshAxis` or process group. None and the world group, which
                ``self.all_gather`` passes, select the data axis.

        Communication: one all-gather over the axis; one reduce-scatter in the backward pass.
        """
        if self._mesh is None or self._mesh.world.size == 1:
            return tensor
        axis = self._axis_of(group)
        if axis is None:
            return super().all_gather(tensor, group, sync_grads)
        with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
            return all_gather_sequence(tensor.unsqueeze(0), axis)

    # ---- plugins and data

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise UnsupportedError(
            "a CheckpointIO plugin cannot be used with this strategy, because every rank writes "
            f"its own shards: the plugin is {type(io).__name__}. Remove it from "
            "Trainer(plugins=...)."
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return seed_dataloader(dataloader, torch.initial_seed(), self.data_parallel_rank)


def _set_rank_zero(rank: int) -> None:
    """Set the rank of Lightning's rank-zero functions."""
    rank_zero_only.rank = utils_rank_zero_only.rank = rank  # type: ignore[attr-defined]
