"""Methods of the user's modules that a run replaces: updates of averages, and the reduction of
torchmetrics over the data-parallel ranks.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.private.loops import replace_method


def check_averages(module: nn.Module, undo: ExitStack) -> None:
    """Let every ``AveragedModel`` compare its weights with those that it averages.

    Torch pairs them in their order, so that it would average wrong ones or none.
    """
    for name, part in module.named_modules():
        if isinstance(part, AveragedModel):
            replace_method(undo, part, "update_parameters", partial(_update, name, part))


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


def reduce_metrics_over_data(module: nn.Module, mesh: ParallelMesh, undo: ExitStack) -> None:
    """Let torchmetrics reduce over the data ranks until ``undo`` is closed.

    A sum over all ranks would also count the copies on tensor, context and pipeline ranks. A metric
    with its own process group keeps it.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            undo.callback(setattr, metric, "process_group", None)
            metric.process_group = mesh.dp.group
            if mesh.dp.size == 1:
                # Without a group torchmetrics would reduce over all ranks.
                available = metric.distributed_available_fn
                undo.callback(setattr, metric, "distributed_available_fn", available)
                metric.distributed_available_fn = _never


def _never() -> bool:
    return False
