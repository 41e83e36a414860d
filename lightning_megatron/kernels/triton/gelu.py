"""GELU, exact or with the tanh approximation; forward and backward are one pass each."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of
from lightning_megatron.shapes import Float

_BLOCK = 2048
# 2 sqrt(2 / pi), 1 / sqrt(2) and 1 / sqrt(2 pi).
_SLOPE = tl.constexpr(1.5957691216057308)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_CUBIC = tl.constexpr(0.044715)


def apply_gelu(
    hidden: Float[Tensor, "*shape"], approximate_by_tanh: bool
) -> Float[Tensor, "*shape"]:
    """Apply GELU: multiply every element by the standard normal distribution function at it.

    Equal to torch.nn.functional.gelu, computed in float32 and rounded once. The tanh approximation
    is computed as ``x sigmoid(2 u)``. This is equal to ``x (1 + tanh u) / 2``, and needs one
    exponential and no branch.

    Args:
        approximate_by_tanh: Whether to use the tanh approximation, as GPT-2 does.

    Source: Hendrycks and Gimpel 2016.
    """
    return _GELU.apply(hidden, approximate_by_tanh)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, approximate_by_tanh: bool) -> Tensor:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden)
        ctx.by_tanh = approximate_by_tanh
        output = torch.empty_like(hidden)
        if output.numel():
            with on_device_of(hidden):
                _forward[(ceil_div(hidden.numel(), _BLOCK),)](
                    hidden,
                    output,
                    hidden.numel(),
                    BY_TANH=approximate_by_tanh,
                    BLOCK=_BLOCK,
                )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        result = torch.empty_like(hidden)
        if result.numel():
            with on_device_of(hidden):
                _backward[(ceil_div(hidden.numel(), _BLOCK),)](
                    hidden,
                    grad,
                    result,
                    hidden.numel(),
                    BY_TANH=ctx.by_tanh,
                    BLOCK=_BLOCK,
                )
        return result, None


@triton.jit
def _forward(
    hidden: tl.tensor,
    output: tl.tensor,
    size: tl.tensor,
    BY_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32)
    if BY_TANH:
        result = x / (1.0 + tl.exp(x * -_SLOPE * (1.0 + x * _CUBIC * x)))
    else:
        result = 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    tl.store(output + offsets, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    hidden: tl.tensor,
    grad: tl.tensor,
    result: tl.tensor,
    size: tl.tensor,
    BY_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    if BY_TANH:
        mass = 1.0 / (1.0 + tl.exp(x * -_SLOPE * (1.0 + x * _CUBIC * x)))
        # For a large x the mass is rounded to 0 or 1, and the product would be 0 times infinity.
        flat = mass * (1.0 - mass)
        change = x * flat * _SLOPE * (1.0 + x * (3.0 * _CUBIC) * x)
        slope = mass + tl.where(flat == 0.0, 0.0, change)
    else:
        slope = 0.5 * (1.0 + tl.erf(x * _ROOT_HALF)) + x * _DENSITY * tl.exp(-0.5 * x * x)
    tl.store(result + offsets, (outer * slope).to(result.dtype.element_ty), mask=inside)
