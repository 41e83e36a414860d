"""Reduction of torchmetrics over the data-parallel ranks during a run."""

from __future__ import annotations

from torch import nn
from torchmetrics import Metric

from lightning_megatron.groups.mesh import ParallelMesh


class MetricGroups:
    """Torchmetrics of a module, set to reduce over the data ranks until :meth:`restore`.

    A sum over all ranks would also count the copies on tensor, context and pipeline ranks.

    Args:
        module: Module that contains the metrics; a metric with its own process group keeps it.
        mesh: Process groups of this rank.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        metrics = [
            part
            for part in module.modules()
            if isinstance(part, Metric) and part.process_group is None
        ]
        self._before = [(metric, metric.distributed_available_fn) for metric in metrics]
        for metric in metrics:
            metric.process_group = mesh.dp.group
            if mesh.dp.size == 1:
                # Without a group torchmetrics would reduce over all ranks.
                metric.distributed_available_fn = _never

    def restore(self) -> None:
        """Restore the metrics' own settings."""
        for metric, available in self._before:
            metric.process_group = None
            metric.distributed_available_fn = available


def _never() -> bool:
    return False
