"""Copies of modules without elements, and calls of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.host_values import HostValues
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.models.stage import PipelinedModule, pipelined_modules
from lightning_megatron.nest import leaves, rebuild

_META = torch.device("meta")
#: Data that a module may refer to, which copies share with it.
_DATA = (Dataset, DataLoader, np.ndarray)


class _TwinsForCopies(TorchFunctionMode):
    """Mode in which copies of tensors have no elements."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") != "__deepcopy__":
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), twin_of(tensor, self._device))


def twin_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor without elements, with the attributes of another one."""
    shape = tensor.shape
    empty = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty


def copy_without_elements(
    module: nn.Module,
    replaced: Mapping[int, Any] | None = None,
    device: torch.device = _META,
) -> nn.Module:
    """Return a deep copy of a module whose tensors have no elements.

    Models of this package that were built on a mesh of several ranks are whole in the copy.

    Args:
        replaced: What stands in the copy for objects, by their identity.
        device: Device of the copy: meta, or inside of the context of a pretended device that one.

    Raises:
        UnsupportedError: If the module refers to something that cannot be copied.
    """
    memo = dict(replaced or {})
    for _, model in pipelined_modules(module):
        if model.mesh.layout.world_size > 1 and id(model) not in memo:
            memo[id(model)] = _whole_twin(model)
        memo.setdefault(id(model.mesh), model.mesh)
    for part in module.modules():
        shared = [value for value in vars(part).values() if isinstance(value, _DATA)]
        memo |= {id(value): value for value in shared}
    # Parameters copy themselves without asking the mode.
    for tensor in module.parameters():
        memo.setdefault(id(tensor), twin_of(tensor, device))
    try:
        with _TwinsForCopies(device):
            copy: nn.Module = deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error})"
        ) from error
    return copy


def _whole_twin(model: PipelinedModule) -> nn.Module:
    """Return a model that was built on a mesh as one process builds it."""
    if not isinstance(model, LayeredModule):
        raise UnsupportedError("its blocks were divided among stages by an earlier fit")
    kind: Any = type(model)
    with torch.device("meta"):
        whole = kind(model.config)
    whole.recompute = model.recompute
    if isinstance(model, GPT):
        whole.loss_chunk = model.loss_chunk
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return whole.train(model.training)


def batch_on_host(batch: Any) -> Any:
    """Return a batch with its integers on the host, and without the elements of other tensors."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return rebuild(value, convert)
        is_read = not (value.is_floating_point() or value.is_complex())
        return value.detach().cpu() if is_read else torch.empty_like(value, device=_META)

    return convert(batch)


def batch_without_elements(batch: Any, dtype: torch.dtype | None, host: HostValues) -> Any:
    """Return a batch whose tensors have no elements.

    Args:
        dtype: What floating-point tensors are converted to; None leaves them.
        host: Where the host finds values that it reads in training, too.
    """

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return rebuild(value, convert)
        is_converted = dtype is not None and value.is_floating_point()
        empty = torch.empty(value.shape, dtype=dtype if is_converted else value.dtype, device=_META)
        if not value.is_meta:
            host.note(empty, value)
        return empty

    return convert(batch)


def step_of(module: nn.Module) -> Callable[[Any], Tensor]:
    """Return the function from a microbatch to the loss from which a backward pass starts.

    It is ``training_step`` if the module has one, whose log calls do nothing. Otherwise the batch
    is the argument, the arguments or the keyword arguments of ``forward``, and the loss is that of
    the output, or else the sum of what it returns.
    """
    training_step = getattr(module, "training_step", None)
    if training_step is None:
        return lambda batch: _loss_of(_called(module, batch), sums=True)
    for name in ("log", "log_dict", "print"):
        vars(module)[name] = _ignore
    # Lightning leaves out the index of the batch if the step does not take it.
    num_taken = len(signature(training_step).parameters)
    return lambda batch: _loss_of(training_step(*(batch, 0)[:num_taken]), sums=False)


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _called(module: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def _loss_of(output: Any, *, sums: bool) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if not sums:
        raise UnsupportedError("training_step returned no loss")
    found = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor)]
    totals = [leaf.sum() for leaf in found if leaf.is_floating_point()]
    if not totals:
        raise UnsupportedError("its output has no tensor of real numbers, which could be a loss")
    return sum(totals[1:], totals[0])
