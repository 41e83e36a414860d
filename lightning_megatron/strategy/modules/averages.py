"""Check of averages that user code updates: each rank has the same parts of both modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_megatron.errors import UnsupportedError


@contextmanager
def checked_averages(module: nn.Module) -> Iterator[None]:
    """Let every ``AveragedModel`` compare its weights with those that it averages, in the block.

    Torch pairs them in their order, so that it would average wrong ones or none.

    Args:
        module: User's module, which is divided among the ranks.
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
