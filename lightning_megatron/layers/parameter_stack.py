"""Parameters that one product reads as one tensor, each under a name and with a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec, shard_spec_of
from lightning_megatron.layers.gradient_slot import GradientSlot, StackedSlot, set_slot, slot_of, slots_of
from lightning_megatron.plan.shards import ShardRange


class ParameterStack(nn.Module):
    """Present parameters that lie one below the other as one tensor.

    The parameters of a stack are ordinary ones: they can be frozen, grouped and saved one by one. Where they are
    neighbours in memory, the stack is a view of it; elsewhere it is a copy.

    Shapes: parameters ``(rows_i, ...)``; output ``(sum of rows_i, ...)``.

    Args:
        parameters: The parameters, from the first row to the last.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)
        self._leaf: _Leaf | None = None

    @property
    def parts(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters in order."""
        return tuple(part for part in self._parameters.values() if part is not None)

    def joined(self) -> Tensor:
        """Return the parameters as one tensor, whose gradients reach each of them."""
        if torch.compiler.is_compiling():
            return torch.cat(self.parts)
        if self._leaf is None or not self._leaf.presents(self._parameters.values()):
            self._leaf = _leaf_of(self.parts)
        return _Stacked.apply(*self.parts) if self._leaf is None else self._leaf.tensor

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module takes no part in the training that the slots belong to.
        return {**self.__dict__, "_leaf": None}

    def extra_repr(self) -> str:
        """Show the rows of each parameter."""
        return f"rows={[len(part) for part in self.parts]}"


def split_parameter(parameter: nn.Parameter, rows: Sequence[int]) -> list[nn.Parameter]:
    """Cut a sharded parameter into the parameters whose full tensors lie one below the other in its full tensor.

    The parts share the memory of the parameter. Each keeps its settings, and knows how it lies in its own full tensor.

    Shapes: parameter ``(local rows, ...)`` of a full tensor ``(sum of rows, ...)``.

    Args:
        parameter: A parameter that is cut along its first dimension, without padding.
        rows: Rows of each full tensor (elements).

    Raises:
        ValueError: If the parameter is cut along another dimension or has other rows.
    """
    spec = shard_spec_of(parameter)
    if spec.dim != 0 or sum(rows) != spec.full_shape[0] or len(parameter) != spec.local_extent:
        raise ValueError(
            f"a parameter is split by the rows of its full tensor: {tuple(spec.full_shape)} with {list(rows)} rows, "
            f"cut along dimension {spec.dim}. Give the rows of all parts."
        )
    found: list[nn.Parameter] = []
    first = first_local = 0
    for count in rows:
        own = _part_of(spec, first, count)
        size = own.local_extent
        part = nn.Parameter(parameter.detach()[first_local : first_local + size], parameter.requires_grad)
        part.__dict__.update(parameter.__dict__)
        found.append(set_shard_spec(part, own))
        first += count
        first_local += size
    return found


def _part_of(spec: ShardSpec, first: int, count: int) -> ShardSpec:
    """Describe the shard of some rows of a full tensor as one of a full tensor of these rows alone."""
    ranges = []
    for piece in spec.ranges:
        start, stop = max(piece.start, first), min(piece.stop, first + count)
        if start < stop:
            ranges.append(ShardRange(start - first, stop - first, piece.copy))
    return replace(spec, full_shape=(count, *spec.full_shape[1:]), ranges=tuple(ranges))


@dataclass(frozen=True)
class _Leaf:
    """Hold the tensor that presents neighbours in memory whose gradients are summed in slots.

    Autograd has nothing to pass on for such a stack, so the tensor is a leaf of every graph: calls share it and cost
    no node. The products that read it add their gradients to its slot.
    """

    tensor: Tensor
    #: Address and slot of each parameter when the tensor was made.
    places: tuple[tuple[int, GradientSlot], ...]

    def presents(self, parts: Iterable[Tensor | None]) -> bool:
        """Return whether the tensor still lies where these parameters do, and their gradients go to the same slots."""
        for part, (address, slot) in zip(parts, self.places, strict=True):
            if part is None or part.data_ptr() != address or slot_of(part) is not slot:
                return False
        return True


def _leaf_of(parts: Sequence[nn.Parameter]) -> _Leaf | None:
    """Return the leaf for parameters that are neighbours and have slots; None for others."""
    slots = [slot for slot in slots_of(parts) if slot is not None]
    tensor = neighbours_as_one(parts) if len(slots) == len(parts) else None
    if tensor is None:
        return None
    slot = StackedSlot(slots, [len(part) for part in parts])
    set_slot(tensor.requires_grad_(), slot)
    # What reads the stack without asking for a slot leaves its gradient to autograd.
    tensor.register_post_accumulate_grad_hook(partial(_move_to_slot, slot))
    return _Leaf(tensor, tuple((part.data_ptr(), slot) for part, slot in zip(parts, slots, strict=True)))


def _move_to_slot(slot: StackedSlot, leaf: Tensor) -> None:
    if leaf.grad is not None:
        slot.add(leaf.grad)
        leaf.grad = None


class _Stacked(torch.autograd.Function):
    """Join parameters without a copy where they are neighbours in memory."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        ctx.set_materialize_grads(False)
        view = neighbours_as_one(parts)
        return torch.cat(parts) if view is None else view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = grads[0]
        if whole is None:
            return (None,) * len(ctx.rows)
        needed = ctx.needs_input_grad
        return tuple(part if is_needed else None for part, is_needed in zip(whole.split(ctx.rows), needed, strict=True))


def neighbours_as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors as one that shares their memory; None unless each lies directly behind the one before.

    Shapes: parts ``(rows_i, ...)``, contiguous; output ``(sum of rows_i, ...)``.
    """
    first = parts[0]
    place, itemsize = first.data_ptr(), first.element_size()
    num_rows = 0
    for part in parts:
        is_next = part.data_ptr() == place and part.is_contiguous()
        if not is_next or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            return None
        place += part.numel() * itemsize
        num_rows += len(part)
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())
