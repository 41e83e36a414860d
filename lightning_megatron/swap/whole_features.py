"""Inputs of sharded layers, for a comparison with the same layers on all features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import gather_from_axis
from lightning_megatron.layers.linear.feature_shard import FeatureShard, gathered
from lightning_megatron.layers.linear.sequence_shard import SequenceShard, gather_shard
from lightning_megatron.swap.decide.kinds import FULL_VIEWS, SWAPPED_AS, split_kind

#: Kinds of layers that produce or consume sharded features, and of modules sharded with them.
_CUT = ("column", "row", "features")
#: Kinds of layers whose sharded features user code sees in full, and of those that take them.
_FULL = (*FULL_VIEWS, "row_split")
#: Maximum size of the sample of a call's input (elements). A sample has some positions, each with
#: all of this rank's features.
_MAX_SAMPLE_ELEMENTS = 2**16


@dataclass(frozen=True)
class CutLayer:
    """Layer that works on sharded features."""

    name: str
    kind: str
    module: nn.Module


@dataclass(frozen=True)
class LayerInput:
    """Sampled input of a layer.

    Args:
        sample: Some positions of the input, with this rank's features.
    """

    layer: CutLayer
    sample: Tensor

    def distance(self, other: LayerInput) -> float | None:
        """Return the relative distance of two inputs; None if they cannot be compared."""
        left, right = (
            layer_input.sample.double().nan_to_num(1e30, 1e30, -1e30)
            for layer_input in (self, other)
        )
        if self.layer != other.layer or left.shape != right.shape:
            return None
        size = max(float(left.norm()), float(right.norm()))
        return float((left - right).norm()) / size if size else 0.0


def cut_layers(module: nn.Module) -> list[CutLayer]:
    """List the layers between which features are sharded, and the modules sharded with them."""
    return _layers_of(module, _CUT)


def full_layers(module: nn.Module) -> list[CutLayer]:
    """List the layers whose sharded features user code sees in full, and those that take them."""
    layers = _layers_of(module, _FULL)
    return layers if any(layer.kind in FULL_VIEWS for layer in layers) else []


def _layers_of(module: nn.Module, kinds: Sequence[str]) -> list[CutLayer]:
    layers = [
        CutLayer(name, split_kind(getattr(part, SWAPPED_AS, ""))[0], part)
        for name, part in module.named_modules()
    ]
    return [layer for layer in layers if layer.kind in kinds]


@contextmanager
def record_inputs(
    layers: Sequence[CutLayer], axis: MeshAxis, *, is_whole: bool
) -> Iterator[list[LayerInput]]:
    """Record the inputs of sharded layers inside the block.

    Args:
        is_whole: Whether every rank computes on all features between the layers. If so, ``column``
            layers gather their outputs, ``row`` layers take their part of complete inputs, and
            parameters that are sharded with the features are gathered. The matrix products are the
            same in both cases, so only the code between the layers can cause a difference.

    Yields:
        Inputs of ``column`` and ``row`` layers, in the order of the calls.

    Communication: with ``is_whole``, one all-gather over the axis for each call of a ``column``
    layer, and one for each parameter of a called ``features`` module.
    """
    inputs: list[LayerInput] = []
    with ExitStack() as stack:
        for layer in layers:
            for handle in _hooks(layer, axis, inputs, is_whole):
                stack.callback(handle.remove)
            stack.callback(_put_back, layer.module, layer.module._parameters)
        yield inputs


def _hooks(
    layer: CutLayer, axis: MeshAxis, inputs: list[LayerInput], is_whole: bool
) -> Iterator[Any]:
    module = layer.module
    if layer.kind == "features":
        if is_whole:
            parts = module._parameters
            yield module.register_forward_pre_hook(partial(_gather_parameters, axis=axis))
            yield module.register_forward_hook(
                lambda *_: _put_back(module, parts), always_call=True
            )
        return
    if is_whole and layer.kind in ("column", *FULL_VIEWS):
        yield module.register_forward_hook(partial(_gather_output, axis=axis), prepend=True)
    note: Callable[..., Any] = partial(
        _note, layer=layer, axis=axis, inputs=inputs, is_whole=is_whole
    )
    yield module.register_forward_pre_hook(note, with_kwargs=True)


def _note(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    layer: CutLayer,
    axis: MeshAxis,
    inputs: list[LayerInput],
    is_whole: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Record a sample of an input, and cut the complete input of a row layer."""
    values = args or tuple(kwargs.values())
    if not values or not isinstance(values[0], Tensor):
        return None
    hidden = values[0]
    takes_part = is_whole and layer.kind == "row"
    if takes_part or layer.kind == "row_split":
        hidden = gather_shard(hidden)
        width = int(module.weight.shape[1])  # type: ignore[index]
        if hidden.shape[-1] == width * axis.size:
            hidden = hidden[..., axis.rank * width : (axis.rank + 1) * width]
    inputs.append(LayerInput(layer, _sample(gathered(hidden))))
    if not takes_part:
        return None
    return (
        ((hidden, *args[1:]), dict(kwargs))
        if args
        else (args, {**kwargs, next(iter(kwargs)): hidden})
    )


def _sample(hidden: Tensor) -> Tensor:
    part = (hidden.part if isinstance(hidden, SequenceShard) else hidden).detach()
    rows = part.reshape(-1, part.shape[-1]) if part.dim() else part.reshape(1, 1)
    count = max(1, _MAX_SAMPLE_ELEMENTS // max(1, rows.shape[1]))
    # Clone the sample, because a view would keep the whole input in memory.
    return rows[:: max(1, -(-rows.shape[0] // count))].clone()


def _gather_output(
    module: nn.Module, args: tuple[Any, ...], output: Tensor, *, axis: MeshAxis
) -> Tensor:
    if isinstance(output, FeatureShard):
        return output.gather_full()
    return gather_from_axis(output, axis, dim=-1)


def _gather_parameters(module: nn.Module, args: tuple[Any, ...], *, axis: MeshAxis) -> None:
    with torch.no_grad():
        module._parameters = {
            name: None
            if part is None
            else nn.Parameter(gather_from_axis(part, axis, dim=0), part.requires_grad)
            for name, part in module._parameters.items()
        }


def _put_back(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    module._parameters = parameters
