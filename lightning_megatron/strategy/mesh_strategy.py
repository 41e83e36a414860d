"""Ranks, processes and communication: the part of the strategy that is independent of models."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import DEFAULT_TIMEOUTS, ParallelMesh
from lightning_megatron.groups.nccl_options import NcclOptions
from lightning_megatron.groups.notices import Notices
from lightning_megatron.groups.sources import own_sources
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.modules.buffers import BufferStrategy
from lightning_megatron.strategy.private.processes import reset_seed, utils_rank_zero_only
from lightning_megatron.strategy.private.user_module import publish_device_mesh
from lightning_megatron.strategy.process.dataloaders import seed_dataloader
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.hang_watch import HangWatch, activity_of
from lightning_megatron.strategy.process.launcher import MegatronLauncher
from lightning_megatron.strategy.process.mesh_communication import MeshCommunication
from lightning_megatron.strategy.process.rendezvous import check_backend, join_processes

log = logging.getLogger(__name__)


class MeshStrategy(MeshCommunication, BufferStrategy):
    """Strategy with one process per device, joined in a mesh of parallel axes.

    Args:
        sizes: Arguments of the :class:`ParallelLayout` other than the world size.
        sequence_parallel: Whether the mesh shards activations along the sequence.
        timeout: Time that a collective may wait for a rank; None means torch's default.
        process_group_backend: ``nccl`` or ``gloo``; None chooses by the device.
        nccl_options: NCCL options by axis.
        overlaps_matmul: Whether matrix products next to sequence communication overlap with it.
    """

    def __init__(
        self,
        sizes: Mapping[str, Any],
        sequence_parallel: bool,
        timeout: timedelta | None,
        process_group_backend: str | None,
        nccl_options: NcclOptions | str | None,
        overlaps_matmul: bool = False,
    ) -> None:
        self._sizes = dict(sizes)
        self._sequence_parallel = sequence_parallel
        self._timeout = timeout
        self._backend = process_group_backend
        self._nccl_options = nccl_options
        self._overlaps_matmul = overlaps_matmul
        self._num_nodes = 1
        self._layout: ParallelLayout | None = None
        self._mesh: ParallelMesh | None = None
        self._watch = FailureWatch(0)
        self._hang_watch: HangWatch | None = None
        super().__init__()

    # ---- ranks

    @property
    def layout(self) -> ParallelLayout:
        """Return the sizes of all axes; known once the Trainer exists."""
        if self._layout is None:
            self._layout = ParallelLayout(self.num_nodes * self.num_processes, **self._sizes)
        return self._layout

    @property
    def mesh(self) -> ParallelMesh:
        """Return the groups of this rank; known while the Trainer runs.

        Raises:
            RuntimeError: Before ``setup_environment`` and after ``teardown``.
        """
        if self._mesh is None:
            raise RuntimeError(
                "the mesh exists while the Trainer runs: from the `setup` hook to the `teardown` "
                "hook."
            )
        return self._mesh

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None, "the Trainer sets the devices"
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of the job."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._layout = None

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

    def set_world_ranks(self) -> None:
        """Set the ranks of the cluster environment and of Lightning's rank-zero functions."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise UnsupportedError(
            f"a CheckpointIO plugin cannot be used with this strategy: {type(io).__name__}. Every "
            "rank writes its own shards, which the plugin would not see. Remove it from "
            "Trainer(plugins=...)."
        )

    @override
    def _configure_launcher(self) -> None:
        self._layout = None
        # Sizes that do not divide raise here, inside Trainer(...), before any process exists.
        layout = self.layout
        if self._layer_sync is not None:
            raise UnsupportedError(
                "Trainer(sync_batchnorm=True) cannot be used with this strategy: batch statistics "
                "over microbatches and stages would differ from those of the batch. Use norms "
                "without batch statistics."
            )
        check_backend(self._backend, self.root_device)
        assert self.cluster_environment is not None, "the Trainer sets the cluster environment"
        log.debug("layout: %s", layout)
        self._watch = FailureWatch(self.global_rank, self.num_processes)
        self._launcher = MegatronLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            lambda: self._watch,
            self.check_run,
        )

    def configuration(self) -> dict[str, str | int]:
        """Return the settings that must be equal on all ranks before groups exist, by name."""
        return {**asdict(self.layout), "lightning-megatron sources": own_sources()}

    def check_run(self, arguments: Mapping[str, Any]) -> None:
        """Check the keyword arguments of fit, validate, test or predict before any launch."""

    # ---- the mesh's life

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._watch.rank = self.global_rank
        self.join_mesh()
        assert self.lightning_module is not None, "the Trainer has connected the module"
        publish_device_mesh(self.lightning_module, self._mesh)

    def join_mesh(self) -> ParallelMesh:
        """Create this rank's groups and agree on the seed.

        The process group of all ranks lives as long as the process, as in Lightning's strategies.
        :meth:`leave_mesh` destroys all other groups.

        Communication: collective over all ranks.
        """
        layout, seed = self.layout, torch.initial_seed()
        if layout.world_size > 1:
            join_processes(
                self.cluster_environment,
                self.global_rank,
                layout.world_size,
                self.root_device,
                self._backend,
                self._timeout,
                self.configuration(),
            )
        mesh = ParallelMesh.create(
            layout,
            device=self.root_device,
            seed=seed % 2**63,
            sequence_parallel=self._sequence_parallel,
            backend=self._backend,
            timeout=self._timeout,
            options=self._nccl_options,
            overlaps_matmul=self._overlaps_matmul,
        )
        agreed, job = broadcast_object((seed, uuid.uuid4().hex[:12]), mesh.world_cpu)
        if agreed != seed:
            # The ranks have different seeds: use rank 0's, as ddp uses rank 0's weights.
            torch.manual_seed(agreed)
            mesh.random.seed = agreed % 2**63
        if layout.world_size > 1:
            self._watch_over(mesh, job)
        self._mesh = mesh
        return mesh

    def _watch_over(self, mesh: ParallelMesh, job: str) -> None:
        """Start watching for ranks that fail or hang."""
        notices = Notices(job) if self.num_nodes > 1 else None
        folder = self._watch.join_job(job, notices)
        if folder is None:
            return
        cpu, device = (
            (self._timeout or DEFAULT_TIMEOUTS[kind]).total_seconds()
            for kind in ("cpu", self.root_device.type)
        )
        self._hang_watch = HangWatch(
            mesh.rank,
            mesh.world.size,
            mesh.journal,
            cpu,
            None if self.root_device.type == "cpu" else device,
            folder,
            notices,
            lambda: activity_of(self.lightning_module),
            self._watch.report_hang,
        )
        self._hang_watch.start()

    def leave_mesh(self) -> None:
        """Destroy the process groups of this run."""
        if self._hang_watch is not None:
            self._hang_watch.stop()
            self._hang_watch = None
        # A failed rank must not wait for the others here; the end of the process closes everything.
        if self._mesh is not None and not self._watch.has_failed:
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

    # ---- data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return seed_dataloader(dataloader, torch.initial_seed(), self.data_parallel_rank)
