"""Choice of the layers of a model that compute in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.layers.fp8.scaling import Scaling
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.plan.fp8 import FP8

_Linear = ColumnParallelLinear | RowParallelLinear


def set_fp8(model: LayeredModule, settings: FP8, emulate: bool) -> list[str]:
    """Let linear layers of a model compute in 8 bits; return the names of this rank's.

    Args:
        model: The model.
        settings: Which layers do, and how.
        emulate: Whether products are computed in the precision of the device.

    Raises:
        ParallelPlanError: If the sizes of a layer do not fit, or if a pattern matches no layer.
    """
    scaling = Scaling(settings, emulate)
    num_layers = sum(model.partition.counts)
    linears = {name: (index, part) for index, name, part in _linears(model)}
    _check_patterns(settings, list(linears), num_layers)
    found = []
    for name, (index, part) in linears.items():
        part.scaling = None
        if settings.includes(index, num_layers, name):
            settings.check_sizes(name, *_local_sizes(part))
            part.scaling = scaling
            found.append(name)
    return found


def _check_patterns(settings: FP8, names: list[str], num_layers: int) -> None:
    """Refuse patterns that match no linear layer, in any layer of the model.

    Args:
        settings: The settings.
        names: Names of the linear layers of this rank; empty if it has no layers.
        num_layers: Layers of the whole model.
    """
    kinds = sorted({name.split(".", 2)[2] for name in names})
    anywhere = [f"layers.{index}.{kind}" for index in range(num_layers) for kind in kinds]
    for pattern in settings.keep:
        if names and not any(fnmatchcase(name, pattern) for name in anywhere):
            raise ParallelPlanError(
                f"fp8.keep must name linear layers: {pattern!r} matches none of "
                f"{', '.join(f'layers.N.{kind}' for kind in kinds)}. Correct the pattern, or leave "
                "it out."
            )


def _linears(model: LayeredModule) -> Iterator[tuple[int, str, _Linear]]:
    """Yield layer index, name and module of the linear layers outside of routed experts."""
    for index, layer in model.layers.items():
        routed = {
            id(part)
            for mixture in layer.modules()
            if isinstance(mixture, MixtureOfExperts)
            for name, child in mixture.named_children()
            if name != "shared"
            for part in child.modules()
        }
        for name, part in layer.named_modules():
            if isinstance(part, _Linear) and id(part) not in routed:
                yield int(index), f"layers.{index}.{name}", part


def _local_sizes(part: _Linear) -> tuple[int, int]:
    """Return the output and input features of this rank."""
    stack = part.weights if isinstance(part, ColumnParallelLinear) else None
    weights = [part.weight] if stack is None else list(stack.parts)
    return sum(len(weight) for weight in weights), weights[0].shape[1]
