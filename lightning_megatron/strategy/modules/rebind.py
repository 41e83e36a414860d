"""Preparation of the modules inside a LightningModule before training."""

from __future__ import annotations

from torch import nn
from torchmetrics import Metric

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.plan.activations import Recompute


class MetricGroups:
    """Torchmetrics of a module, set to reduce over the data ranks until :meth:`restore`.

    A sum over all ranks would also count the copies on tensor and pipeline ranks.

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
            metric.process_group = mesh.data.group
            if mesh.data.size == 1:
                # Without a group torchmetrics would reduce over all ranks.
                metric.distributed_available_fn = _never

    def restore(self) -> None:
        """Restore the metrics' own settings."""
        for metric, available in self._before:
            metric.process_group = None
            metric.distributed_available_fn = available


def _never() -> bool:
    return False


def find_models(module: nn.Module, recompute: Recompute | None) -> list[LayeredModule]:
    """Return the models of this package inside a module, and set their recomputation.

    Args:
        module: Module that contains the models.
        recompute: Recomputation setting; None keeps the setting of each model.

    Raises:
        UnsupportedError: If recomputation is requested and the module has no model of this package.
    """
    models = [model for _, model in pipelined_modules(module) if isinstance(model, LayeredModule)]
    if recompute not in (None, "none") and not models:
        raise UnsupportedError(
            f"recompute ({recompute!r}) needs a model of this package: {type(module).__name__} has "
            "none. Other modules would ignore the setting. Use a lightning_megatron.GPT, "
            "torch.utils.checkpoint in the module, or recompute=None."
        )
    if recompute is not None:
        for model in models:
            model.recompute = recompute
    return models
