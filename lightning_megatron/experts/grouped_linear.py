"""The product of rows that are sorted by group with one weight for each group, on the fastest kernel that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.experts import grouped_operator
from lightning_megatron.experts.product_choice import Backend, choose_product
from lightning_megatron.experts.products import PRODUCTS, Loop
from lightning_megatron.layers.gradient_slot import GradientSlot, SlotRow, slots_of

#: What computes the output of rows, weights (or their stack) and ends.
Output = Callable[[Tensor, Sequence[Tensor] | Tensor, Tensor], Tensor]


def grouped_linear(rows: Tensor, weights: Sequence[Tensor], ends: Tensor, backend: Backend | None = None) -> Tensor:
    """Multiply each group of rows by the transpose of its own weight.

    Equal to ``linear(rows[ends[e - 1]:ends[e]], weights[e])`` for every group ``e``. Rows past the last end are neither
    read nor written, forward and backward: what they hold in the output and in the gradient of ``rows`` is undefined.
    The weight of an empty group has a gradient of zeros. Weights that have a gradient slot get their gradients there;
    the bundled kernels sum them in float32 where the slots lie at equal distances.

    Weights that lie in one memory at equal distances, in order, are multiplied as they are; the kernels copy others
    side by side first. A stack ``(E, N, K)`` of them is given as ``stack.unbind()``.

    Inside of ``torch.compile`` it is one operator, and gradients reach slots through autograd.

    Shapes: rows ``(R, K)``; weights E of ``(N, K)``; ends ``(E)`` int32 on the device of rows; output ``(R, N)``.

    Args:
        rows: Rows sorted by group.
        weights: One weight for each group.
        ends: One past the last row of every group.
        backend: What computes it; None leaves the choice to :func:`choose_product`.
    """
    weights = tuple(weights)
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    rows = rows.to(dtype)
    if torch.compiler.is_compiling():
        return grouped_operator.grouped_linear(rows, weights, ends, backend)
    if backend is None:
        out_features, in_features = weights[0].shape
        backend = choose_product(rows.device, dtype, len(weights), in_features, out_features).backend
    product = PRODUCTS[backend]
    return differentiable_product(rows, weights, ends, product, product.output)


def differentiable_product(
    rows: Tensor, weights: tuple[Tensor, ...], ends: Tensor, product: type[Loop], output: Output
) -> Tensor:
    """Compute a product and tell autograd of it; :func:`grouped_linear` says what it is.

    Args:
        rows: Rows sorted by group.
        weights: One weight for each group.
        ends: One past the last row of every group.
        product: What computes the gradients.
        output: What computes the output.
    """
    rows = rows.contiguous()
    slots = [slot for slot in slots_of(weights) if slot is not None] if torch.is_grad_enabled() else []
    if len(slots) == len(weights):
        return _IntoSlots.apply(rows, ends, product, output, weights[0], weights, slots)
    return _GroupedLinear.apply(rows, ends, product, output, *weights)


class _IntoSlots(torch.autograd.Function):
    """Compute a product all of whose weights have slots.

    Autograd is told of the first weight alone: it has no gradient to give to any, and each that it knows costs it more
    than the slots do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ends: Tensor,
        product: type[Loop],
        output: Output,
        first: Tensor,
        weights: tuple[Tensor, ...],
        slots: list[GradientSlot],
    ) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.product, ctx.weights, ctx.slots = product, weights, slots
        ctx.versions = _versions(weights)
        # Kept for the backward pass only if it takes no memory.
        ctx.view = SlotRow.of(slots).stacked_weights(weights)
        return output(rows, weights if ctx.view is None else ctx.view, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        if _versions(ctx.weights) != ctx.versions:
            raise RuntimeError(
                "weights must not change between a forward and its backward pass: one of a grouped product was "
                "modified by an inplace operation. The gradient would be that of another function. Step the optimizer "
                "after the backward pass."
            )
        grad, grad_rows = grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_rows = ctx.product.input_gradient(grad, ctx.weights if ctx.view is None else ctx.view, ends)
        ctx.product.add_weight_gradients(grad, rows, ends, ctx.slots)
        return grad_rows, None, None, None, None, None, None


def _versions(weights: tuple[Tensor, ...]) -> list[int]:
    return [weight._version for weight in weights]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, product: type[Loop], output: Output, *weights: Tensor) -> Tensor:
        needs_weights = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(rows if needs_weights else None, ends, *weights)
        ctx.product = product
        # The slots of this moment: a frozen weight has none, even if it is thawed before the backward pass.
        ctx.slots = slots_of(weights)
        return output(rows, weights, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad, grad_rows = grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_rows = ctx.product.input_gradient(grad, weights, ends)
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if rows is not None:
            found = ctx.product.weight_gradients(grad, rows, ends)
            for number, (weight, slot) in enumerate(zip(weights, ctx.slots, strict=True)):
                if slot is not None:
                    slot.add(found[number])
                elif ctx.needs_input_grad[4 + number]:
                    grad_weights[number] = found[number].to(weight.dtype)
        return grad_rows, None, None, None, *grad_weights
