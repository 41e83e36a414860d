"""Methods of the user's modules that a run replaces: updates of averages, and the reduction of
torchmetrics over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh


@contextmanager
def checked_averages(module: nn.Module) -> Iterator[None]:
    """Let every ``AveragedModel`` compare its weights with those that it averages, in the block.

    Torch pairs them in their order, so that it would average wrong ones or none.
    """
    averages = {
        name: part for name, part in module.named_modules() if isinstance(part, AveragedModel)
    }
    for name, average in averages.items():
        average.update_parameters = partial(_update, name, average)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for average in averages.values():
            vars(average).pop("update_parameters", None)


def _update(name: str, average: AveragedModel, model: nn.Module) -> None:
    shapes = _shapes(average.module)
    averaged = _shapes(model)
    if shapes != averaged:
        raise UnsupportedError(
            f"the AveragedModel {name!r} cannot average this module with tp or pp above 1: on this "
            f"rank the average has weights of the shapes {shapes}, and the module {averaged}. They "
            f"were divided in different ways. Give {f'{name}.module'!r} the kinds of the module in "
            "tensor_parallel_plan and pipeline_plan ('first' or 'last'), or use Lightning's "
            "EMAWeightAveraging callback, which averages the whole module."
        )
    type(average).update_parameters(average, model)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in module.parameters() if not weight.is_meta]


class MetricGroups:
    """Torchmetrics of a module, set to reduce over the data ranks until :meth:`restore`.

    A sum over all ranks would also count the copies on tensor, context and pipeline ranks.

    Args:
        module: Module that contains the metrics; a metric with its own process group keeps it.
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
