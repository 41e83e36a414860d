"""Activations of plain modules that are cut along the sequence, which compute as whole ones do whatever meets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import copy_to_axis, gather_from_axis, split_to_axis

#: The dimension that is cut: the one before the features.
CUT = -2

_BINARY = ("add", "sub", "mul", "div", "true_divide")
#: Functions that treat every position alike, and so can be done on a part.
_BY_POSITION = frozenset(
    {f"{prefix}{name}{suffix}" for name in _BINARY for prefix, suffix in (("", ""), ("__", "__"), ("__r", "__"))}
    | {"__truediv__", "__rtruediv__", "__neg__", "neg", "rsub", "gelu", "silu", "relu", "tanh", "sigmoid", "softplus"}
    | {"to", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach"}
)  # fmt: skip
_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
#: What is the same of a part and of the whole.
_COMMON = frozenset({"__get__", "__set__", "dim", "is_floating_point", "is_complex", "get_device"})


class SequenceShard(Tensor):
    """Hold one tensor-parallel rank's positions of an activation, and stand for all of them.

    Its shape is that of the whole. What treats every position alike is done on the part; before everything else the
    parts are gathered, so that the result is that of the whole in any case.

    Shapes: the whole ``(..., S, D)``; the part ``(..., S/tp, D)``.
    Communication: an all-gather over tp where it is used in another way.
    """

    axis: MeshAxis

    @classmethod
    def of(cls, part: Tensor, axis: MeshAxis) -> SequenceShard:
        """Take a tensor for this rank's part."""
        result = part.as_subclass(cls)
        result.axis = axis
        return result

    @property
    def part(self) -> Tensor:
        """Return this rank's positions."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def whole(self) -> Tensor:
        """Return all positions, for a use that every rank has alike."""
        return gather_from_axis(self.part, self.axis, dim=CUT)

    def whole_shape(self) -> torch.Size:
        """Return the shape of the whole."""
        shape = list(self.part.shape)
        shape[CUT] *= self.axis.size
        return torch.Size(shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the shape; values would have to be gathered by all ranks."""
        return f"SequenceShard({tuple(self.whole_shape())})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on the part, or on the whole."""
        kwargs, name = dict(kwargs or {}), func.__name__
        if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
            return args[0].whole_shape()
        if name == "size":
            shape = args[0].whole_shape()
            return shape[args[1]] if len(args) > 1 else shape[kwargs["dim"]] if kwargs else shape
        if name in _COMMON:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if "out" in kwargs or name in _IN_PLACE or name.endswith("_") != name.endswith("__"):
            raise UnsupportedError(
                f"{name} writes into an activation that is cut along the sequence, of which this rank has a part. "
                "Compute a new tensor, or leave 'sequence' out of the plan."
            )
        axis = next(leaf.axis for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        parts = _parts((*args, *kwargs.values()), axis) if name in _BY_POSITION else None
        if parts is None:
            args, kwargs = pytree.tree_map(whole_of, (args, kwargs))
            return func(*args, **kwargs)
        return cls.of(func(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True))), axis)


def whole_of(value: Any) -> Any:
    """Return all positions of an activation that is cut along the sequence, and everything else as it is."""
    return value.whole() if isinstance(value, SequenceShard) else value


def _parts(values: Sequence[Any], axis: MeshAxis) -> list[Any] | None:
    """Return what meets element by element on this rank's positions; None if it does not meet there."""
    lengths = {value.whole_shape()[CUT] for value in values if isinstance(value, SequenceShard)}
    parts = []
    for value in values:
        if isinstance(value, SequenceShard):
            parts.append(value.part)
        elif not isinstance(value, Tensor):
            parts.append(value)
        elif value.dim() < 2 or value.shape[CUT] == 1:
            # Every rank uses it for its own positions alone.
            parts.append(copy_to_axis(value, axis) if value.requires_grad else value)
        elif {value.shape[CUT]} == lengths:
            parts.append(split_to_axis(value, axis, CUT))
        else:
            return None
    return parts if len(lengths) == 1 else None
