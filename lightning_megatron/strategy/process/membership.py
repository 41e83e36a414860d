"""Membership of a process in the job: its process groups and the watch over the other ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.mesh_groups import DEFAULT_TIMEOUTS
from lightning_megatron.groups.notices import Notices
from lightning_megatron.plan.context_transport import ContextLinks
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.strategy.options.strategy_options import StrategyOptions
from lightning_megatron.strategy.process.failure import FailureWatch
from lightning_megatron.strategy.process.hang_watch import HangWatch
from lightning_megatron.strategy.process.rendezvous import ReservedPort, join_processes


class Membership:
    """Joining and leaving the mesh of one job.

    The process group of all ranks lives as long as the process, as in Lightning's strategies.
    :meth:`leave` destroys all other groups.

    Args:
        port: Port of the job's store, held if this process starts the others.
    """

    def __init__(self, options: StrategyOptions, watch: FailureWatch, port: ReservedPort) -> None:
        self.watch = watch
        self._port = port
        self._options = options
        self._hang_watch: HangWatch | None = None

    def join(
        self,
        layout: ParallelLayout,
        rank: int,
        device: torch.device,
        environment: ClusterEnvironment | None,
        num_nodes: int,
        configuration: Mapping[str, str | int],
        place: Callable[[], str],
    ) -> ParallelMesh:
        """Create this rank's groups, agree on the seed, and watch for ranks that fail or hang.

        Args:
            num_nodes: Number of nodes of the job (nodes).
            configuration: Settings that must be equal on all ranks, by name.
            place: Function that describes the Trainer's current stage and step, for hang reports.

        Communication: collective over all ranks.
        """
        options = self._options
        timeout = options.job.timeout_delta
        seed = torch.initial_seed()
        if layout.world_size > 1:
            join_processes(
                environment,
                rank,
                layout.world_size,
                device,
                options.job.backend,
                timeout,
                configuration,
                self._port.detach(),
            )
        ranks_per_host = layout.world_size // num_nodes
        links = ContextLinks.of(options.context.transport, layout, ranks_per_host)
        mesh = ParallelMesh.create(
            layout,
            device=device,
            seed=seed % 2**63,
            sequence_parallel=options.shards_sequence,
            backend=options.job.backend,
            timeout=timeout,
            options=options.job.nccl,
            overlaps_matmul=options.linear.overlap,
            context=links,
            loss_chunk=options.loss_chunk,
        )
        agreed, job = broadcast_object((seed, uuid.uuid4().hex[:12]), mesh.world_cpu)
        if agreed != seed:
            # The ranks have different seeds: use rank 0's, as ddp uses rank 0's weights.
            torch.manual_seed(agreed)
            mesh.random.seed = agreed % 2**63
        if layout.world_size > 1:
            self._watch_over(mesh, job, num_nodes, place)
        return mesh

    def leave(self, mesh: ParallelMesh | None) -> None:
        """Stop the watch for hung ranks, and destroy the groups of a mesh.

        Args:
            mesh: The groups of this rank; None without any.
        """
        if self._hang_watch is not None:
            self._hang_watch.stop()
            self._hang_watch = None
        # A failed rank must not wait for the others here; the end of the process closes everything.
        if mesh is not None and not self.watch.has_failed:
            mesh.destroy()

    def _watch_over(
        self, mesh: ParallelMesh, job: str, num_nodes: int, place: Callable[[], str]
    ) -> None:
        """Start watching for ranks that fail or hang."""
        notices = Notices(job) if num_nodes > 1 else None
        folder = self.watch.join_job(job, notices)
        if folder is None:
            return
        cpu, device = (
            (self._options.job.timeout_delta or DEFAULT_TIMEOUTS[kind]).total_seconds()
            for kind in ("cpu", mesh.device.type)
        )
        self._hang_watch = HangWatch(
            mesh.rank,
            mesh.world.size,
            mesh.journal,
            cpu,
            None if mesh.device.type == "cpu" else device,
            folder,
            notices,
            place,
            self.watch.report_hang,
        )
        self._hang_watch.start()
