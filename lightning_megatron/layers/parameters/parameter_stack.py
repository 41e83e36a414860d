"""Several parameters that a fused layer reads as one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_megatron.groups.shard_spec import set_shard_spec, shard_spec_of
from lightning_megatron.layers.parameters.eight_bit_parameter import EightBitWeight, placeholder
from lightning_megatron.layers.parameters.gradient_slot import (
    GradientSlot,
    StackedSlot,
    neighbours_as_one,
    set_slot,
    slot_of,
    slots_of,
)
from lightning_megatron.plan.shards import ShardRange
from lightning_megatron.shapes import Float


class ParameterStack(nn.Module):
    """Parameters that are concatenated along the first dimension.

    Each parameter keeps its name and gradient, and can be frozen, put into an optimizer group and
    saved separately. If the parameters are adjacent in memory, the concatenation is a view;
    otherwise it is a copy.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)
        self._leaf: _Leaf | None = None

    @property
    def parts(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters from the first row to the last."""
        return tuple(part for part in self._parameters.values() if part is not None)

    def concatenate(self) -> Float[Tensor, "rows ..."]:
        """Concatenate the parameters; the gradient of the result reaches each of them."""
        if torch.compiler.is_compiling():
            return torch.cat(self.parts)
        if self._leaf is None or not self._leaf.presents(self._parameters.values()):
            self._leaf = _leaf_of(self.parts)
        return _Stacked.apply(*self.parts) if self._leaf is None else self._leaf.tensor

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module must not add to the gradient slots of the original.
        return {**self.__dict__, "_leaf": None}

    @override
    def extra_repr(self) -> str:
        return f"rows={[len(part) for part in self.parts]}"


def split_parameter(parameter: nn.Parameter, rows: Sequence[int]) -> list[nn.Parameter]:
    """Split a sharded parameter into parts with the given numbers of full rows.

    The parts share the memory and the attributes of the parameter, which is sharded along its first
    dimension without padding. Each part gets the ShardSpec of its full tensor.
    """
    spec = shard_spec_of(parameter)
    if spec.dim != 0 or sum(rows) != spec.full_shape[0] or len(parameter) != spec.local_extent:
        raise ValueError(
            "the rows of the parts must add up to those of the full tensor: they are "
            f"{list(rows)}, and the full tensor has shape {tuple(spec.full_shape)} and is sharded "
            f"along dimension {spec.dim}. Pass the rows of all parts."
        )
    parts: list[nn.Parameter] = []
    first = first_local = 0
    for count in rows:
        held = common_ranges(spec.ranges, range(first, first + count))
        full_shape = (count, *spec.full_shape[1:])
        part_spec = replace(spec, full_shape=full_shape, ranges=tuple(held))
        size = part_spec.local_extent
        part = nn.Parameter(
            parameter.detach()[first_local : first_local + size],
            parameter.requires_grad,
        )
        part.__dict__.update(parameter.__dict__)
        parts.append(set_shard_spec(part, part_spec))
        first += count
        first_local += size
    return parts


def common_ranges(ranges: Iterable[ShardRange], rows: range) -> list[ShardRange]:
    """Return the intersection of ranges and rows, relative to the first of the rows."""
    common = []
    for piece in ranges:
        start = max(piece.start, rows.start)
        stop = min(piece.stop, rows.stop)
        if start < stop:
            common.append(ShardRange(start - rows.start, stop - rows.start, piece.copy))
    return common


@dataclass(frozen=True)
class _Leaf:
    """Concatenated parameters as a leaf tensor of autograd, for parameters with gradient slots.

    The layers that read the tensor add its gradient to its slot, so autograd need not pass a
    gradient to the parameters. One leaf therefore serves all calls, without a graph node per call.
    """

    tensor: Tensor
    #: Address and slot of each parameter when the tensor was created.
    origins: tuple[tuple[int, GradientSlot], ...]

    def presents(self, parts: Iterable[Tensor | None]) -> bool:
        for part, (address, slot) in zip(parts, self.origins, strict=True):
            if part is None or part.data_ptr() != address or slot_of(part) is not slot:
                return False
        return True


def _leaf_of(parts: Sequence[nn.Parameter]) -> _Leaf | None:
    """Return the leaf for adjacent parameters with slots; None for others."""
    slots = [slot for slot in slots_of(parts) if slot is not None]
    tensor = _as_one(parts) if len(slots) == len(parts) else None
    if tensor is None:
        return None
    slot = StackedSlot(slots, [len(part) for part in parts])
    set_slot(tensor.requires_grad_(), slot)
    # Operators that do not support gradient slots accumulate the gradient in ``.grad``.
    tensor.register_post_accumulate_grad_hook(partial(_move_to_slot, slot))
    return _Leaf(
        tensor,
        tuple((part.data_ptr(), slot) for part, slot in zip(parts, slots, strict=True)),
    )


def _move_to_slot(slot: StackedSlot, leaf: Tensor) -> None:
    if leaf.grad is not None:
        slot.add(leaf.grad)
        leaf.grad = None


class _Stacked(torch.autograd.Function):
    """Concatenation that makes no copy if the parameters are adjacent in memory."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        ctx.set_materialize_grads(False)
        view = _as_one(parts)
        return torch.cat(parts) if view is None else view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = grads[0]
        if whole is None:
            return (None,) * len(ctx.rows)
        return tuple(whole.split(ctx.rows))


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent parameters as one view of their memory; None if they are not adjacent.

    Parameters that are stored in 8 bits are joined to a placeholder of NaN that takes no memory.
    """
    if all(isinstance(part, EightBitWeight) for part in parts):
        return placeholder(parts[0], sum(map(len, parts)))
    return neighbours_as_one(parts)
