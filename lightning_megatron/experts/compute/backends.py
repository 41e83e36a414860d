"""Backends of the three products of a grouped linear layer: two kernels and a reference loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.experts.compute.choose_backend import BackendName
from lightning_megatron.layers.gradient_slot import GradientSlot, SlotRow
from lightning_megatron.layers.stacked_view import stacked_view
from lightning_megatron.plan.grouped_gemm import (
    Pass,
    VariantChoice,
    choose_variant,
    workspace_bytes,
)
from lightning_megatron.shapes import Float, Int

# Cache size for kernel variants: the number of rows may differ from step to step.
_REMEMBERED_LAUNCHES = 1024


class Loop:
    """Loop over groups: the reference for the other backends, for any device and dtype."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
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
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
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
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        return F.grouped_mm(rows, stacked(weights).to(rows.dtype).transpose(1, 2), offs=ends)

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
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
    """Grouped products by the bundled kernels, which add weight gradients to float32 slots."""

    @staticmethod
    def output(
        rows: Float[Tensor, "rows in_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows out_local"]:
        """Return rows times the transposes of weights."""
        stack = _rows_apart(stacked(weights).to(rows.dtype))
        return _launch(
            Pass.FORWARD, rows.new_empty((rows.shape[0], stack.shape[1])), rows, stack, ends
        )

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
        """Return SwiGLU of the product, times probabilities, and the product itself if it is kept.

        The product of rows and transposed weights is rounded before the activation in both cases.
        """
        stack = _rows_apart(stacked(weights).to(rows.dtype))
        out_features = stack.shape[1]
        result = rows.new_empty((rows.shape[0], out_features // 2))
        kept = rows.new_empty((rows.shape[0], out_features)) if keep else None
        _launch_swiglu(result, kept, rows, stack, probabilities, ends)
        return result, kept

    @staticmethod
    def input_gradient(
        grad: Float[Tensor, "rows out_local"],
        weights: Sequence[Float[Tensor, "out_local in_local"]]
        | Float[Tensor, "experts out_local in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "rows in_local"]:
        """Return the gradient of rows."""
        stack = _rows_apart(stacked(weights).to(grad.dtype))
        return _launch(
            Pass.DATA_GRAD, grad.new_empty((grad.shape[0], stack.shape[2])), grad, stack, ends
        )

    @staticmethod
    def weight_gradients(
        grad: Float[Tensor, "rows out_local"],
        rows: Float[Tensor, "rows in_local"],
        ends: Int[Tensor, "experts"],
    ) -> Float[Tensor, "experts out_local in_local"]:
        """Return the gradients of all weights as one stack."""
        result = grad.new_empty((ends.shape[0], grad.shape[1], rows.shape[1]))
        return _launch(Pass.WEIGHT_GRAD_BF16, result, grad, rows, ends)

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

        def add(sums: Tensor, overwrite: bool) -> None:
            which = Pass.WEIGHT_GRAD_FP32 if overwrite else Pass.WEIGHT_GRAD_ADD
            _launch(which, sums, grad, rows, ends, row.scale)

        if not _takes_sums(row) or not row.add(add):
            super().add_weight_gradients(grad, rows, ends, slots)


BACKENDS: dict[BackendName, type[Loop]] = {
    "bundled": Bundled,
    "grouped_mm": GroupedMM,
    "loop": Loop,
}


def stacked(
    weights: Sequence[Float[Tensor, "out_local in_local"]]
    | Float[Tensor, "experts out_local in_local"],
) -> Float[Tensor, "experts out_local in_local"]:
    """Return weights as one tensor: a view if they have a constant stride, else a copy.

    A tensor that is a stack already is returned unchanged.
    """
    if isinstance(weights, Tensor):
        return weights
    view = stacked_view(weights)
    return torch.stack(tuple(weights)) if view is None else view


def _launch(
    which: Pass, result: Tensor, a: Tensor, b: Tensor, ends: Tensor, alpha: float = 1.0
) -> Tensor:
    """Launch the kernel variant that ``plan.grouped_gemm`` chooses, without a host read.

    A CUDA graph can capture it: the workspace comes from the graph's memory pool.
    """
    stack = b if which is Pass.FORWARD or which is Pass.DATA_GRAD else result
    choice, num_sms, num_bytes = _plan_launch(which, a.shape[0], *stack.shape, a.device)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=a.device)
    run = torch.ops.lm_kernels.grouped_gemm.default
    run(result, a, b, ends, workspace, choice.variant, choice.along_n, choice.band, num_sms, alpha)
    return result


def _launch_swiglu(
    result: Tensor,
    kept: Tensor | None,
    rows: Tensor,
    stack: Tensor,
    probabilities: Tensor,
    ends: Tensor,
) -> None:
    choice, num_sms, num_bytes = _plan_launch(
        Pass.FORWARD_SWIGLU, rows.shape[0], *stack.shape, rows.device
    )
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
    run = torch.ops.lm_kernels.grouped_swiglu.default
    order = (choice.variant, choice.along_n, choice.band, num_sms)
    run(result, kept, rows, stack, probabilities, ends, workspace, *order)


@lru_cache(_REMEMBERED_LAUNCHES)
def _plan_launch(
    which: Pass, num_rows: int, num_groups: int, n: int, k: int, device: torch.device
) -> tuple[VariantChoice, int, int]:
    """Return the kernel variant, its number of CTAs and the size of its workspace (bytes)."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return (
        choose_variant(which, num_rows, num_groups, n, k),
        num_sms,
        workspace_bytes(num_groups, num_sms),
    )


def _rows_apart(stack: Tensor) -> Tensor:
    """Return a stack whose weights lie whole rows apart, so that kernels see one matrix."""
    return stack if _is_rows_apart(stack) else stack.contiguous()


def _is_rows_apart(stack: Tensor) -> bool:
    _, _, k = stack.shape
    return stack.stride(0) % k == 0 and stack.stride()[1:] == (k, 1)


def _takes_sums(row: SlotRow) -> bool:
    return row.sums is not None and row.sums.dtype == torch.float32 and row.is_contiguous


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
