"""Hugging Face models built without memory for weights, but with computed tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)

#: Functions that create tensors from explicit values.
_CONSTRUCTORS = frozenset(
    {torch.arange, torch.linspace, torch.tensor, torch.ones, torch.zeros, torch.full}
)


def without_weights(build: Callable[[], M]) -> M:
    """Build a model with parameters on the meta device, and with the values of computed tables.

    Tables are non-persistent buffers. Other buffers are on the meta device, like parameters.

    Args:
        build: Function that builds the model.
    """
    with torch.device("meta"), _ComputingTables():
        model = build()
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                empty = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                # Shared parameters must stay shared.
                module._parameters[key] = moved.setdefault(id(parameter), empty)  # type: ignore[assignment]
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                module._buffers[key] = buffer.to("meta")
    return model


class _ComputingTables(TorchFunctionMode):
    """Torch function mode that creates tensors from explicit values on the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; tensors with explicit values are created on the CPU."""
        kwargs = dict(kwargs or {})
        if func in _CONSTRUCTORS and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
