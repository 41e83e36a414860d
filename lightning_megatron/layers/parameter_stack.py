"""Parameters that one product reads as one tensor, each under a name and with a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.groups.shard_spec import ShardSpec, set_shard_spec, shard_spec_of
from lightning_megatron.layers.gradient_slot import GradientSlot, StackedSlot, set_slot, slots_of
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
        self._slot: StackedSlot | None = None

    @property
    def parts(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters in order."""
        return tuple(part for part in self._parameters.values() if part is not None)

    def forward(self) -> Tensor:
        """Return the parameters as one tensor, whose gradients reach each of them."""
        parts = self.parts
        if torch.compiler.is_compiling():
            return torch.cat(parts)
        slots = [slot for slot in slots_of(parts) if slot is not None]
        stacked: Tensor = _Stacked.apply(*parts)
        if len(slots) == len(parts):
            set_slot(stacked, self._slot_of(slots, [len(part) for part in parts]))
        return stacked

    def _slot_of(self, slots: list[GradientSlot], rows: list[int]) -> StackedSlot:
        """Return the slot of the whole stack, which is kept until the parameters get other slots."""
        if self._slot is None or self._slot.slots != tuple(slots):
            self._slot = StackedSlot(slots, rows)
        return self._slot

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module takes no part in the training that the slot belongs to.
        return {**self.__dict__, "_slot": None}

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
