"""Granularity at which an optimizer can be partitioned, found by a trial run."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_megatron.errors import UnsupportedError

logger = logging.getLogger(__name__)

#: Smallest part that one rank may own: ``elements`` of parameters, whole ``parameters``, or only
#: the whole ``model``.
ShardGranularity = Literal["elements", "parameters", "model"]

_STEPS = 3
_COARSER: tuple[ShardGranularity, ...] = ("elements", "parameters", "model")
_SPEED_ONLY = frozenset({"fused", "foreach", "capturable", "differentiable"})
_STEP_ERRORS = (TypeError, ValueError, RuntimeError, NotImplementedError)
#: Group entries that are not settings, or that schedulers change: with a learning rate of zero,
#: all trials would have equal results.
_EXCLUDED_SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr", "max_lr", "min_lr"})


def finest_granularity(optimizer: Optimizer) -> ShardGranularity:
    """Find the smallest part of a model that an optimizer trains independently of the rest.

    New optimizers of the same class and settings train two small matrices: both in one optimizer,
    each in a separate optimizer, and cut into flat pieces. The result is the finest division that
    changes only rounding. State that is not shaped like its parameter, such as one scale per block
    of elements, cannot be saved in pieces, so parameters stay whole. Groups with different settings
    are tried one by one, because a setting may select another algorithm; the coarsest result
    counts. An optimizer that cannot be tried, such as one around another, may need the whole model.

    Args:
        optimizer: Optimizer of the user, which does not change.
    """
    if isinstance(optimizer, LBFGS):
        # L-BFGS has one search direction for the whole model.
        return "model"
    tried: dict[str, ShardGranularity] = {}
    for group in optimizer.param_groups:
        settings = _changed_settings(group, optimizer.defaults)
        if repr(settings) not in tried:
            tried[repr(settings)] = _granularity_with(optimizer, settings)
    return max(tried.values(), key=_COARSER.index)


def _granularity_with(
    optimizer: Optimizer, changed_settings: Mapping[str, Any]
) -> ShardGranularity:
    """Find the finest granularity of an optimizer with the settings of one of its groups."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Some optimizers run only where their parameters are, such as those with kernels for GPUs.
    devices = [torch.device("cpu"), *(parameter.device for parameter in trained[:1])]
    reason: Exception | None = None
    for device, dtype in zip(devices, (torch.float64, torch.float32), strict=False):
        try:
            return _granularity_on(_matrices(device, dtype), optimizer, changed_settings)
        except (*_STEP_ERRORS, KeyError, AttributeError, AssertionError) as error:
            reason = reason or error
    logger.warning(
        "%s could not be tried on small matrices (%s: %s), so every rank keeps the whole of its "
        "state, as with zero=0.",
        type(optimizer).__name__,
        type(reason).__name__,
        reason,
    )
    return "model"


def _granularity_on(
    matrices: list[Tensor], optimizer: Optimizer, changed_settings: Mapping[str, Any]
) -> ShardGranularity:
    """Find the finest granularity by training copies of some matrices."""
    together, is_cut_alike = _train([matrices], optimizer, changed_settings)
    apart, _ = _train([[matrix] for matrix in matrices], optimizer, changed_settings)
    if not all(map(torch.allclose, together, apart)):
        return "model"
    if not is_cut_alike:
        return "parameters"
    try:
        pieces, _ = _train(
            [[matrix.flatten()[:5], matrix.flatten()[5:]] for matrix in matrices],
            optimizer,
            changed_settings,
        )
    except (*_STEP_ERRORS, IndexError, AssertionError):
        return "parameters"
    joined = [torch.cat(pieces[i : i + 2]) for i in (0, 2)]
    return (
        "elements"
        if all(map(torch.allclose, (matrix.flatten() for matrix in together), joined))
        else "parameters"
    )


def check_granularity(
    optimizer: Optimizer, granularity: ShardGranularity, sizes: Mapping[str, int]
) -> None:
    """Raise an error if an optimizer needs more of the model than one rank has.

    Args:
        optimizer: Optimizer of the user.
        granularity: Finest granularity of the optimizer.
        sizes: Sizes of the axes that cut the model, by the names of their options (ranks).

    Raises:
        UnsupportedError: If the optimizer's result would depend on the layout.
    """
    # Pipeline and expert parallelism leave parameters whole.
    cutting = {"elements": (), "parameters": ("tp", "etp"), "model": ("tp", "etp", "pp", "ep")}
    cuts = [name for name in cutting[granularity] if sizes[name] > 1]
    if cuts:
        needed = "whole parameters" if granularity == "parameters" else "the whole model"
        shown = " and ".join(f"{name} ({sizes[name]})" for name in cuts)
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be used with {shown} above 1, because it needs "
            f"{needed}. Each rank has only a part, and the result would depend on the layout. Use "
            "an element-wise optimizer such as AdamW, SGD or Adagrad, or "
            f"{' and '.join(f'{name}=1' for name in cuts)}."
        )


def _matrices(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).to(device)
        for shape in ((4, 3), (5, 6))
    ]


def _changed_settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings that differ from the optimizer's defaults."""
    changed = {
        key: value for key, value in group.items() if key not in _EXCLUDED_SETTINGS | _SPEED_ONLY
    }
    return {
        key: value
        for key, value in changed.items()
        if not isinstance(value, Tensor)
        and (key not in defaults or repr(defaults[key]) != repr(value))
    }


def _train(
    owners: list[list[Tensor]], like: Optimizer, changed_settings: Mapping[str, Any]
) -> tuple[list[Tensor], bool]:
    """Train copies of tensors, each inner list in a separate optimizer.

    Returns:
        The tensors, and whether all state is shaped like its parameter or a scalar, so that it can
        be saved in parts.
    """
    trained: list[Tensor] = []
    is_cut_alike = True
    for tensors in owners:
        parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        optimizer: Any = _new(like, parameters, changed_settings)
        for step in range(_STEPS):
            closure = partial(_backward, parameters, step + 2)
            closure()
            optimizer.step(closure=closure)
        trained += [parameter.detach() for parameter in parameters]
        is_cut_alike &= all(
            _is_like(value, parameter)
            for parameter, state in optimizer.state.items()
            for value in state.values()
        )
    return trained, is_cut_alike


@torch.no_grad()
def _backward(parameters: list[nn.Parameter], factor: int) -> Tensor:
    """Set the gradients of a loss, and return the loss.

    Each element of a gradient depends on its parameter element alone, so the gradients do not
    depend on how a tensor is cut.
    """
    for parameter in parameters:
        parameter.grad = torch.sin(parameter * factor)
    return -torch.stack([torch.cos(parameter * factor).sum() for parameter in parameters]).sum()


def _is_like(value: object, parameter: Tensor) -> bool:
    return not isinstance(value, Tensor) or value.shape in (parameter.shape, (), (1,))


def _new(
    like: Optimizer, parameters: list[nn.Parameter], changed_settings: Mapping[str, Any]
) -> Optimizer:
    """Create an optimizer of the same class, without settings that only affect speed."""
    accepted = inspect.signature(type(like)).parameters
    takes_all = any(
        argument.kind is inspect.Parameter.VAR_KEYWORD for argument in accepted.values()
    )
    settings = {
        key: copy.deepcopy(value)
        for key, value in like.defaults.items()
        if key not in _SPEED_ONLY
        and not isinstance(value, Tensor)
        and (takes_all or key in accepted)
    }
    # Some optimizers accept no groups, so create a group only for settings that are not defaults.
    groups = (
        [{"params": parameters, **copy.deepcopy(dict(changed_settings))}]
        if changed_settings
        else parameters
    )
    return type(like)(groups, **settings)
