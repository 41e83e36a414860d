"""Selection and checks of the layers that compute in 8 bits or with Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.fp8.weight_casts import WeightCasts
from lightning_megatron.layers.linear.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.low_rank import LowRank
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.self_attention import Attention
from lightning_megatron.layers.transformer_engine.engine_scaling import EngineScaling
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.config_checks import ModelConfig
from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.models.layered import LayeredModule, layered_modules
from lightning_megatron.plan.fp8 import FP8, Backend, EnginePart
from lightning_megatron.plan.model_shape import linear_sizes

#: Modules of the parts that can compute with Transformer Engine, beside linear layers.
MODULES: Final[Mapping[EnginePart, tuple[type[nn.Module], ...]]] = {
    "norms": (LayerNorm, RMSNorm),
    "attention": (Attention,),
    "experts": (GroupedMLP,),
}
#: Linear layer that can compute in 8 bits.
Linear = ColumnParallelLinear | RowParallelLinear


def set_fp8(
    model: LayeredModule,
    settings: FP8,
    emulate: bool,
    device: torch.device,
    backend: Backend = "native",
) -> list[str]:
    """Make linear layers of a model compute in 8 bits; return the names of those on this rank.

    With ``emulate``, products are computed in the precision of the device. The model need not be on
    ``device`` yet.
    """
    num_layers = sum(model.partition.counts)
    linears = {name: (index, linear) for index, name, linear in _linears(model)}
    kinds = {name.split(".", 2)[2] for name in linears}
    _check_patterns(settings, kinds, num_layers)
    selected = {}
    for name, (index, linear) in linears.items():
        # Transformer Engine also computes the layers that are not selected, without 8 bits.
        linear.scaling = EngineScaling(None, device) if backend == "te" else None
        if settings.includes(index, num_layers, name):
            settings.check_sizes(name, *_local_sizes(linear), backend)
            selected[name] = linear
    scales = _delayed_scales(model, settings, list(selected), device)
    casts = None if backend == "te" else WeightCasts()
    for number, linear in enumerate(selected.values()):
        layer_scales = None if scales is None else scales.layer(number)
        linear.scaling = (
            EngineScaling(settings, device, layer_scales)
            if casts is None
            else Scaling(settings, emulate, layer_scales, casts=casts.layer(linear))
        )
    model.delayed_scales = scales
    model.weight_casts = casts
    return list(selected)


def unset_fp8(
    model: LayeredModule, device: torch.device | None = None, backend: Backend = "native"
) -> None:
    """Make all layers of a model compute in the precision of the run, after a run in 8 bits.

    The device is needed only for Transformer Engine.
    """
    for _, _, linear in _linears(model):
        linear.scaling = (
            None if device is None or backend == "native" else EngineScaling(None, device)
        )
    model.delayed_scales = None
    model.weight_casts = None


def weights_in_eight_bits(module: nn.Module) -> dict[tuple[str, ...], Linear]:
    """Return the linear layers whose weights shall be stored in 8 bits, by the weights' names.

    A weight that has a parametrization, or that another module reads, too, is refused.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    selected: dict[tuple[str, ...], Linear] = {}
    # `layered_modules` also finds the layers that compute for a Hugging Face model.
    linears = [linear for model in layered_modules(module) for linear in _linears(model)]
    for _, name, linear in linears:
        settings = None if linear.scaling is None else linear.scaling.settings
        if settings is None or settings.parameters is None:
            continue
        names_of_weights = [names.get(id(weight), []) for weight in linear.weight_parts]
        for readers in names_of_weights:
            _check_one_reader(name, readers)
        selected[tuple(readers[0] for readers in names_of_weights)] = linear
    return selected


def _check_one_reader(layer: str, readers: list[str]) -> None:
    if len(readers) == 1:
        return
    reason = "has a parametrization" if not readers else f"is shared by {', '.join(readers)}"
    raise UnsupportedError(
        f"fp8.parameters ('fp8') needs weights that only one linear layer reads, because other "
        f"modules cannot read weights in 8 bits: the weight of {layer} {reason}. Name the layer in "
        "fp8.keep, or leave fp8.parameters out."
    )


def set_part(model: LayeredModule, part: EnginePart, backend: Backend) -> int:
    """Make the modules of a part of a model, such as its norms, compute with a library; return
    their number on this rank.
    """
    modules: list[Any] = [one for one in model.modules() if isinstance(one, MODULES[part])]
    for module in modules:
        module.uses_engine = backend == "te"
    return len(modules)


def _delayed_scales(
    model: LayeredModule, settings: FP8, names: list[str], device: torch.device
) -> DelayedScales | None:
    """Return the scales for the delayed recipe; those of an earlier run if they still apply."""
    if settings.recipe != "delayed":
        return None
    scales = model.delayed_scales
    if scales is not None and scales.serves(settings, names, device):
        return scales
    return DelayedScales(settings, names, device)


def check_fp8_config(
    config: ModelConfig, settings: FP8, tp: int, backend: Backend = "native"
) -> None:
    """Check the sizes and name patterns of 8-bit layers before the model is built."""
    if isinstance(config, EncoderConfig):
        config = config.of_layers()
    if not isinstance(config, GPTConfig):
        return
    shape = config.memory_shape()
    sizes = [linear_sizes(shape, layer, tp) for layer in range(shape.num_layers)]
    _check_patterns(settings, set().union(*sizes), shape.num_layers)
    for layer, linears in enumerate(sizes):
        for name, (out_features, in_features) in linears.items():
            full_name = f"layers.{layer}.{name}"
            if settings.includes(layer, shape.num_layers, full_name):
                settings.check_sizes(full_name, out_features, in_features, backend)


def _check_patterns(settings: FP8, kinds: AbstractSet[str], num_layers: int) -> None:
    """Raise if a pattern matches no linear layer in any block of the model.

    ``kinds`` are the names of linear layers within a block; empty if this rank has none.
    """
    anywhere = [f"layers.{index}.{kind}" for index in range(num_layers) for kind in kinds]
    known = ", ".join(f"layers.N.{kind}" for kind in sorted(kinds))
    for pattern in settings.keep:
        if kinds and not any(fnmatchcase(name, pattern) for name in anywhere):
            raise ParallelPlanError(
                f"fp8.keep must name linear layers: {pattern!r} matches none of "
                f"{known}. Correct the pattern, or leave it out."
            )


def _linears(model: LayeredModule) -> Iterator[tuple[int, str, Linear]]:
    """Yield the block index, name and module of linear layers, except experts and adapters."""
    for index, layer in model.layers.items():
        left_out = {
            id(part)
            for mixture in layer.modules()
            if isinstance(mixture, MixtureOfExperts)
            for name, child in mixture.named_children()
            if name != "shared"
            for part in child.modules()
        }
        updates = (part for part in layer.modules() if isinstance(part, LowRank))
        left_out |= {id(part) for update in updates for part in update.modules()}
        for name, part in layer.named_modules():
            if isinstance(part, Linear) and id(part) not in left_out:
                yield int(index), f"layers.{index}.{name}", part


def _local_sizes(linear: Linear) -> tuple[int, int]:
    """Return the output and input features of this rank."""
    stack = linear.weights if isinstance(linear, ColumnParallelLinear) else None
    weights = [linear.weight] if stack is None else list(stack.parts)
    return sum(len(weight) for weight in weights), weights[0].shape[1]
