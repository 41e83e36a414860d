"""Sequence-parallel activations in modules without support for sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import copy_to_axis, gather_from_axis, split_to_axis
from lightning_megatron.layers.linear.feature_shard import FeatureShard, gathered
from lightning_megatron.layers.linear.shard_functions import SIZES, answer_by_shape
from lightning_megatron.shapes import Shaped

#: The sharded dimension: the one before the features.
CUT = -2

_BINARY = ("add", "sub", "mul", "div", "true_divide")
#: Functions that compute every position independently, so that they can run on a shard.
_BY_POSITION = frozenset(
    {
        f"{prefix}{name}{suffix}"
        for name in _BINARY
        for prefix, suffix in (("", ""), ("__", "__"), ("__r", "__"))
    }
    | {"__truediv__", "__rtruediv__", "__neg__", "neg", "rsub"}
    | {"gelu", "silu", "relu", "tanh", "sigmoid", "softplus"}
    | {"to", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach"}
)  # fmt: skip
_IN_PLACE = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"},
)
#: Functions whose result is the same for a shard and for the full tensor.
_SHARD_INVARIANT = frozenset(
    {"__get__", "__set__", "dim", "is_floating_point", "is_complex", "get_device"}
)


class SequenceShard(Tensor):
    """Full activation of which this rank stores only its positions.

    The shape is that of the full activation. Functions that compute every position independently
    run on this rank's shard. Before all other functions the shards are all-gathered, so every
    function returns the result for the full activation.

    Communication: an all-gather over tp before functions that cannot run on a shard.
    """

    axis: MeshAxis

    @classmethod
    def of(cls, part: Shaped[Tensor, "... seq_local hidden"], axis: MeshAxis) -> SequenceShard:
        """Return the activation whose shard on this rank is ``part``."""
        result = part.as_subclass(cls)
        result.axis = axis
        return result

    @property
    def part(self) -> Shaped[Tensor, "... seq_local hidden"]:
        """Return this rank's shard."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def gather_full(self) -> Shaped[Tensor, "... seq hidden"]:
        """Gather the full activation; all ranks must use the result in the same way."""
        return gather_from_axis(self.part, self.axis, dim=CUT)

    @property
    def full_shape(self) -> torch.Size:
        """Return the shape of the full activation."""
        shape = list(self.part.shape)
        shape[CUT] *= self.axis.size
        return torch.Size(shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the shape only: showing values would need a collective call of all ranks."""
        return f"SequenceShard({tuple(self.full_shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_shape = func == Tensor.shape.__get__  # type: ignore[attr-defined]
        name = "shape" if is_shape else func.__name__
        if name in SIZES:
            return answer_by_shape(name, args[0].full_shape, args[1:], kwargs)
        if name in _SHARD_INVARIANT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # In-place functions end in one underscore, special methods in two.
        if "out" in kwargs or name in _IN_PLACE or name.endswith("_") != name.endswith("__"):
            raise UnsupportedError(
                "an activation that is sharded along the sequence must not be written in place, "
                f"because this rank has only a part of it: {name} writes into it. Compute a new "
                "tensor, or leave 'sequence' out of the plan."
            )
        if FeatureShard in types:
            args, kwargs = pytree.tree_map(gathered, (args, kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        axis = next(leaf.axis for leaf in leaves if isinstance(leaf, cls))
        parts = _parts((*args, *kwargs.values()), axis) if name in _BY_POSITION else None
        if parts is None:
            args, kwargs = pytree.tree_map(gather_shard, (args, kwargs))
            return func(*args, **kwargs)
        return cls.of(
            func(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True))),
            axis,
        )


def gather_shard(value: Any) -> Any:
    """Return the full tensor of a shard, and other values unchanged."""
    return value.gather_full() if isinstance(value, SequenceShard | FeatureShard) else value


def _parts(values: Sequence[Any], axis: MeshAxis) -> list[Any] | None:
    """Return the operands of an elementwise function on this rank's positions.

    None means that the operands cannot be sharded in the same way.
    """
    lengths = {value.full_shape[CUT] for value in values if isinstance(value, SequenceShard)}
    parts = []
    for value in values:
        if isinstance(value, SequenceShard):
            parts.append(value.part)
        elif not isinstance(value, Tensor):
            parts.append(value)
        elif value.dim() < 2 or value.shape[CUT] == 1:
            # The tensor is broadcast along the sequence. Each rank computes the gradient of its own
            # positions only, so the copies' gradients must be summed.
            parts.append(copy_to_axis(value, axis) if value.requires_grad else value)
        elif {value.shape[CUT]} == lengths:
            parts.append(split_to_axis(value, axis, CUT))
        else:
            return None
    return parts if len(lengths) == 1 else None
