"""Linear layer of the router, computed in float32 or wider for operands of any dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.parameters.gradient_slot import slot_of
from lightning_megatron.shapes import Float


def exact_dtype(x: Float[Tensor, "..."]) -> torch.dtype:
    """Return the dtype in which the router computes for an input: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def exact_linear(
    hidden: Float[Tensor, "*tokens hidden"], weight: Float[Tensor, "experts hidden"]
) -> Float[Tensor, "*tokens experts"]:
    """Multiply by the transpose of a weight in float32 or wider, without a cast of the operands.

    On a GPU, operands that share a half type use tensor cores, whose products are exact and whose
    sums are float32. The backward pass splits the float32 gradient into two numbers of the half
    type. Their sum is exact to a relative error of 2^-16 (bfloat16), and both go through the tensor
    cores.
    """
    return _ExactLinear.apply(hidden, weight)


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.slot = slot_of(weight)
        with _without_autocast(hidden):
            if _on_tensor_cores(hidden, weight):
                logits = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
                return logits.view(*hidden.shape[:-1], -1)
            dtype = torch.promote_types(exact_dtype(hidden), weight.dtype)
            return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        rows = hidden.flatten(0, -2)
        grad_rows = None
        # The first dimension holds terms of a sum: two on tensor cores, else one.
        grad_weight = None
        with _without_autocast(grad):
            if _on_tensor_cores(hidden, weight):
                parts = _split(grad, hidden.dtype)
                if ctx.needs_input_grad[0]:
                    grad_rows = parts @ torch.cat([weight, weight])
                if ctx.needs_input_grad[1]:
                    grad_weight = torch.mm(parts.t(), rows, out_dtype=torch.float32).unflatten(
                        0, (2, -1)
                    )
            else:
                if ctx.needs_input_grad[0]:
                    grad_rows = (grad @ weight.to(grad.dtype)).to(hidden.dtype)
                if ctx.needs_input_grad[1]:
                    grad_weight = (grad.t() @ rows.to(grad.dtype)).unsqueeze(0)
        grad_hidden = None if grad_rows is None else grad_rows.view_as(hidden)
        if grad_weight is not None and ctx.slot is not None:
            ctx.slot.add_sum(grad_weight)
            return grad_hidden, None
        return grad_hidden, None if grad_weight is None else grad_weight.sum(0).to(weight.dtype)


def _on_tensor_cores(hidden: Tensor, weight: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in HALF_TYPES


def _split(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Split each number into a sum of two of a half type; each row precedes its remainders."""
    parts = torch.empty((grad.shape[0], 2, grad.shape[1]), dtype=dtype, device=grad.device)
    kernels = fused_kernels(parts)
    if kernels is not None:
        return kernels.split_rows(grad, parts).flatten(1)
    parts[:, 0] = grad
    parts[:, 1] = grad - parts[:, 0]
    return parts.flatten(1)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    # The meta device has no autocast. Entering the context costs more than a kernel launch.
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()
