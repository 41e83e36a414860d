"""Models built without memory for weights: this package's layers for a known family, and Hugging
Face models with computed tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.hugging_face.causal_lm import LabelledGPT

M = TypeVar("M", bound=nn.Module)
#: Functions that create tensors from explicit values.
_CONSTRUCTORS = frozenset(
    {torch.arange, torch.linspace, torch.tensor, torch.ones, torch.zeros, torch.full}
)


def build_layers(
    config: Mapping[str, Any],
    family: Family,
    dtype: torch.dtype,
    mesh: ParallelMesh | None = None,
    *,
    has_pooler: bool = True,
) -> LabelledGPT | Encoder:
    """Build this rank's part of a model on the meta device.

    Args:
        has_pooler: Whether the encoder has a pooler, if its class makes one optional. The
            configuration does not contain this choice.
    """
    settings = family.config(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            if isinstance(settings, GPTConfig):
                return LabelledGPT(settings, mesh)
            has_head = settings.head != "pooler" or has_pooler
            return Encoder(settings if has_head else replace(settings, head="none"), mesh)
    finally:
        torch.set_default_dtype(before)


def without_weights(build: Callable[[], M]) -> M:
    """Build a model with parameters on the meta device, and with the values of computed tables.

    Tables are non-persistent buffers. Other buffers are on the meta device, like parameters.
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
