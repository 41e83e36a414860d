"""Backends of the three products of a grouped linear layer: kernels, libraries and a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.experts.compute.bundled_launch import launch, launch_swiglu
from lightning_megatron.experts.compute.choose_backend import BackendName
from lightning_megatron.layers.parameters.gradient_slot import GradientSlot, SlotRow, stacked_view
from lightning_megatron.plan.grouped_gemm import Pass
from lightning_megatron.shapes import Float, Int


@dataclass(frozen=True)
class HomesAndClones(Sequence[Any]):
    """Weights or slots of this rank's experts, and then of clones on this rank.

    Args:
        homes: One tensor, or a sequence, as for products without clones.
        clones: The same for the last groups.
    """

    homes: Any
    clones: Any

    def __len__(self) -> int:
        return len(self.homes) + len(self.clones)

    def __getitem__(self, index: Any) -> Any:
        homes = len(self.homes)
        return self.homes[index] if index < homes else self.clones[index - homes]

    def __iter__(self) -> Iterator[Any]:
        return chain(self.homes, self.clones)


#: Weights of all groups, one by one or as one tensor.
Weights = (
    Sequence[Float[Tensor, "out_local in_local"]] | Float[Tensor, "experts out_local in_local"]
)


class Loop:
    """Loop over groups: the reference for the other backends, for any device and dtype."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        result = rows.new_empty((rows.shape[0], weights[0].shape[0]))
        for weight, group in zip(weights, _groups(ends), strict=True):
            torch.mm(rows[group], weight.to(rows.dtype).t(), out=result[group])
        return result

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        result = grad.new_empty((grad.shape[0], weights[0].shape[1]))
        for weight, group in zip(weights, _groups(ends), strict=True):
            torch.mm(grad[group], weight.to(grad.dtype), out=result[group])
        return result

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        return torch.stack([grad[group].t() @ rows[group] for group in _groups(ends)])

    @staticmethod
    def add_weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        for slot, group in zip(slots, _groups(ends), strict=True):
            slot.add_product(grad[group], rows[group])


class GroupedMM(Loop):
    """Grouped products by torch's kernel."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        return F.grouped_mm(rows, stacked(weights).to(rows.dtype).transpose(1, 2), offs=ends)

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        return F.grouped_mm(grad, stacked(weights).to(grad.dtype), offs=ends)

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        result = F.grouped_mm(grad.t(), rows, offs=ends)
        # For an empty group some of torch's kernels return the old contents of the accumulators.
        is_empty = ends == torch.cat([ends.new_zeros(1), ends[:-1]])
        return result.masked_fill_(is_empty.view(-1, 1, 1), 0)

    @classmethod
    def add_weight_gradients(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        for slot, gradient in zip(
            slots, cls.weight_gradients(grad, rows, ends).unbind(), strict=True
        ):
            slot.add(gradient)


class Bundled(GroupedMM):
    """Grouped products by the bundled kernels, which add weight gradients to float32 slots.

    One tensor map serves the weights of one launch, so that clones are a second launch.
    """

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        parts = _stacks(weights, rows.dtype, ends)
        result = rows.new_empty((rows.shape[0], parts[0][0].shape[1]))
        for stack, ends_of_part, first_group in parts:
            launch(Pass.FORWARD, result, rows, stack, ends_of_part, first_group=first_group)
        return result

    @staticmethod
    def swiglu(
        rows: Float[Tensor, "rows hidden"],
        weights: Sequence[Float[Tensor, "gate_up hidden"]]
        | Float[Tensor, "experts gate_up hidden"],
        probabilities: Float[Tensor, "rows"],
        ends: Int[Tensor, "experts"],
        *,
        keep: bool,
    ) -> tuple[Float[Tensor, "rows gate_up//2"], Float[Tensor, "rows gate_up"] | None]:
        """Return SwiGLU of the product times probabilities, and the product itself if it is kept.

        The product is rounded before the activation in both cases.
        """
        parts = _stacks(weights, rows.dtype, ends)
        out_features = parts[0][0].shape[1]
        result = rows.new_empty((rows.shape[0], out_features // 2))
        kept = rows.new_empty((rows.shape[0], out_features)) if keep else None
        for stack, ends_of_part, first_group in parts:
            launch_swiglu(result, kept, rows, stack, probabilities, ends_of_part, first_group)
        return result, kept

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Weights,
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        parts = _stacks(weights, grad.dtype, ends)
        result = grad.new_empty((grad.shape[0], parts[0][0].shape[2]))
        for stack, ends_of_part, first_group in parts:
            launch(Pass.DATA_GRAD, result, grad, stack, ends_of_part, first_group=first_group)
        return result

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        result = grad.new_empty((ends.shape[0], grad.shape[1], rows.shape[1]))
        return launch(Pass.WEIGHT_GRAD_BF16, result, grad, rows, ends)

    @classmethod
    def add_weight_gradients(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        for part, ends_of_part, first_group in _parts(slots, ends):
            row = SlotRow.of(part)
            add = partial(_add_products, grad, rows, ends_of_part, row.scale, first_group)
            if not _accepts_sums(row) or not row.add(add):
                super().add_weight_gradients(grad, rows, ends, slots)
                return


def _engine_rows(layout: str, dim: int, rows: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    result = rows.new_empty((rows.shape[0], weights[0].shape[dim]))
    _engine_products(layout, [weight.to(rows.dtype) for weight in weights], rows, [result], ends)
    return result


class Engine(GroupedMM):
    """Grouped products by Transformer Engine: one product per group, on several streams.

    The host reads the ends, as for the loop.
    """

    output = staticmethod(partial(_engine_rows, "TN", 0))
    input_gradient = staticmethod(partial(_engine_rows, "NN", 1))

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        result = grad.new_empty((ends.shape[0], grad.shape[1], rows.shape[1]))
        _engine_products("NT", rows, grad, result, ends)
        return result

    @classmethod
    def add_weight_gradients(
        cls,
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
        slots: Sequence[GradientSlot],
    ) -> None:
        """Add the gradient of every weight to its slot."""
        row = SlotRow.of(slots)

        def add(sums: Tensor, is_empty: bool) -> None:
            _engine_products("NT", rows, grad, sums, ends, adds=not is_empty)

        if row.scale != 1 or not _accepts_sums(row) or not row.add(add):
            super().add_weight_gradients(grad, rows, ends, slots)


BACKENDS: dict[BackendName, type[Loop]] = {
    "bundled": Bundled,
    "grouped_mm": GroupedMM,
    "loop": Loop,
    "te": Engine,
}


def stacked(weights: Weights) -> Float[Tensor, "experts out_local in_local"]:
    """Return weights as one tensor: a view if they have a constant stride, else a copy."""
    if isinstance(weights, Tensor):
        return weights
    view = stacked_view(weights)
    return torch.stack(tuple(weights)) if view is None else view


def _add_products(
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    scale: float,
    first_group: int,
    sums: Tensor,
    overwrite: bool,
) -> None:
    which = Pass.WEIGHT_GRAD_FP32 if overwrite else Pass.WEIGHT_GRAD_ADD
    launch(which, sums, grad, rows, ends, scale, first_group)


def _parts(items: Any, ends: Tensor) -> list[tuple[Any, Tensor, int]]:
    """Return what one launch serves: weights or slots, the ends, and the first group."""
    if not isinstance(items, HomesAndClones):
        return [(items, ends, 0)]
    homes = len(items.homes)
    return [(items.homes, ends[:homes], 0), (items.clones, ends, homes)]


def _stacks(weights: Any, dtype: torch.dtype, ends: Tensor) -> list[tuple[Tensor, Tensor, int]]:
    return [
        (_with_whole_row_strides(stacked(part).to(dtype)), ends_of_part, first_group)
        for part, ends_of_part, first_group in _parts(weights, ends)
    ]


def _with_whole_row_strides(stack: Tensor) -> Tensor:
    """Return a stack whose weights lie whole rows apart, so that kernels see one matrix."""
    return stack if _has_whole_row_strides(stack) else stack.contiguous()


def _has_whole_row_strides(stack: Tensor) -> bool:
    _, _, k = stack.shape
    return stack.stride(0) % k == 0 and stack.stride()[1:] == (k, 1)


def _accepts_sums(row: SlotRow) -> bool:
    return row.sums is not None and row.sums.dtype == torch.float32 and row.is_contiguous


def _engine_products(
    layout: str,
    left: Sequence[Tensor] | Tensor,
    right: Tensor,
    results: Sequence[Tensor] | Tensor,
    ends: Tensor,
    *,
    adds: bool = False,
) -> None:
    """Write the product of each group; with one result, to the rows of the group."""
    groups = _groups(ends)
    sizes = [group.stop - group.start for group in groups]
    factors = map(left.__getitem__, groups) if isinstance(left, Tensor) else left
    import_module("transformer_engine.pytorch.cpp_extensions").general_grouped_gemm(
        list(factors),
        [right[group] for group in groups],
        list(results),
        [None] * len(groups),
        results[0].dtype,
        layout=layout,
        m_splits=sizes,
        grad=layout != "TN",
        accumulate=adds,
        single_output=layout != "NT",
    )


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
