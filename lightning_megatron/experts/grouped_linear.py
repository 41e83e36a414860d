"""The product of rows that are sorted by group with one weight for each group, on the fastest kernel that is there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.layers.gradient_slot import slot_of

_log = logging.getLogger(__name__)
_ALIGNMENT = 16  # of the rows of every operand of torch's grouped product (bytes)

Backend = Literal["grouped_mm", "loop"]


@dataclass(frozen=True)
class ProductChoice:
    """Name what computes grouped products, and why.

    Args:
        backend: ``grouped_mm`` is torch's kernel, which reads the ends on the device; ``loop`` one product after the
            other, for which the ends are read back to the host.
        reason: Why, for the log.
    """

    backend: Backend
    reason: str


@cache
def choose_product(device: torch.device, dtype: torch.dtype, in_features: int, out_features: int) -> ProductChoice:
    """Choose what computes grouped products of a kind, and log the choice once.

    Args:
        device: Where the tensors live.
        dtype: Of rows and weights.
        in_features: Size of each input row (elements).
        out_features: Size of each output row (elements).
    """
    choice = _choose(device, dtype, in_features, out_features)
    _log.info("grouped products by %s: %s", choice.backend, choice.reason)
    return choice


def _choose(device: torch.device, dtype: torch.dtype, in_features: int, out_features: int) -> ProductChoice:
    if device.type != "cuda":
        return ProductChoice("loop", f"{device.type}: ends are on the host already")
    if not hasattr(F, "grouped_mm"):
        return ProductChoice("loop", f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    if dtype != torch.bfloat16:
        return ProductChoice("loop", f"{dtype}: torch's grouped product on a GPU is made for bfloat16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        found = f"compute capability {capability[0]}.{capability[1]}"
        return ProductChoice("loop", f"{found}: torch's grouped product needs 9.0 to read ends on the device")
    for name, size in (("in_features", in_features), ("out_features", out_features)):
        if size * dtype.itemsize % _ALIGNMENT:
            return ProductChoice("loop", f"{name} ({size}) of torch's grouped product must be rows of 16 bytes")
    return ProductChoice("grouped_mm", "bfloat16 on a GPU: torch's grouped product")


def grouped_linear(rows: Tensor, weights: Sequence[Tensor], ends: Tensor, backend: Backend | None = None) -> Tensor:
    """Multiply each group of rows by the transpose of its own weight.

    Equal to ``linear(rows[ends[e - 1]:ends[e]], weights[e])`` for every group ``e``. Rows past the last end are neither
    read nor written, forward and backward: what they hold in the output and in the gradient of ``rows`` is undefined.
    The weight of an empty group has a gradient of zeros. Weights that have a gradient slot get their gradients there.

    Weights that lie in one memory at equal distances, in order, are multiplied as they are; torch's grouped product
    copies others side by side first. A stack ``(E, N, K)`` of them is given as ``stack.unbind()``.

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
    if backend is None:
        out_features, in_features = weights[0].shape
        backend = choose_product(rows.device, dtype, in_features, out_features).backend
    return _GroupedLinear.apply(rows.to(dtype), ends, _PRODUCTS[backend], *weights)


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return weights as one tensor: a view where they lie in one memory at equal distances, in order, else a copy.

    Shapes: E of ``(N, K)``; output ``(E, N, K)``.
    """
    first = weights[0]
    if len(weights) == 1:
        return first.unsqueeze(0)
    step = weights[1].data_ptr() - first.data_ptr()
    memory = first.untyped_storage().data_ptr()
    is_even = step > 0 and all(
        weight.data_ptr() == first.data_ptr() + number * step
        and weight.untyped_storage().data_ptr() == memory
        and (weight.shape, weight.stride(), weight.dtype) == (first.shape, first.stride(), first.dtype)
        for number, weight in enumerate(weights)
    )
    if not is_even:
        return torch.stack(tuple(weights))
    return first.as_strided((len(weights), *first.shape), (step // first.element_size(), *first.stride()))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, product: type[_Loop], *weights: Tensor) -> Tensor:
        needs_weights = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(rows if needs_weights else None, ends, *weights)
        ctx.product = product
        # The slots of this moment: a frozen weight has none, even if it is thawed before the backward pass.
        ctx.slots = [slot_of(weight) for weight in weights]
        return product.output(rows, weights, ends)

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
                elif ctx.needs_input_grad[3 + number]:
                    grad_weights[number] = found[number].to(weight.dtype)
        return grad_rows, None, None, *grad_weights


class _Loop:
    """Compute one group after the other: the oracle of all others, for any device and dtype."""

    @staticmethod
    def output(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
        """Return rows times the transposes of weights."""
        result = rows.new_empty((rows.shape[0], weights[0].shape[0]))
        for weight, group in zip(weights, _groups(ends), strict=True):
            torch.mm(rows[group], weight.to(rows.dtype).t(), out=result[group])
        return result

    @staticmethod
    def input_gradient(grad: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
        """Return the gradient of rows."""
        result = grad.new_empty((grad.shape[0], weights[0].shape[1]))
        for weight, group in zip(weights, _groups(ends), strict=True):
            torch.mm(grad[group], weight.to(grad.dtype), out=result[group])
        return result

    @staticmethod
    def weight_gradients(grad: Tensor, rows: Tensor, ends: Tensor) -> Sequence[Tensor]:
        """Return the gradient of every weight."""
        return [grad[group].t() @ rows[group] for group in _groups(ends)]


class _GroupedMM(_Loop):
    """Compute all groups by torch's kernel."""

    @staticmethod
    def output(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
        """Return rows times the transposes of weights."""
        return F.grouped_mm(rows, stacked(weights).to(rows.dtype).transpose(1, 2), offs=ends)

    @staticmethod
    def input_gradient(grad: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
        """Return the gradient of rows."""
        return F.grouped_mm(grad, stacked(weights).to(grad.dtype), offs=ends)

    @staticmethod
    def weight_gradients(grad: Tensor, rows: Tensor, ends: Tensor) -> Sequence[Tensor]:
        """Return the gradient of every weight."""
        result = F.grouped_mm(grad.t(), rows, offs=ends)
        # A sum over no rows: some of its kernels leave what the accumulators held before.
        is_empty = ends == torch.cat([ends.new_zeros(1), ends[:-1]])
        return result.masked_fill_(is_empty.view(-1, 1, 1), 0).unbind()


_PRODUCTS: dict[Backend, type[_Loop]] = {"loop": _Loop, "grouped_mm": _GroupedMM}


def _groups(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
