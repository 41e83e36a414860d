"""Residual addition fused with a norm, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import (
    as_rows,
    early_start,
    on_device_of,
    power_of_two,
    wait_early,
)
from lightning_megatron.kernels.triton.magnitudes import magnitude_bits, note_magnitude
from lightning_megatron.shapes import Float, Int

# Programs of the backward pass. Each sums the weight gradient over its rows; a later sum over
# programs is in order.
_PROGRAMS = 264
#: Largest supported vector size (elements).
MAX_WIDTH = 32768
#: Function that gets the gradient of a parameter as partial sums, instead of autograd.
GradientSink = Callable[[Tensor], None]


def add_norm(
    hidden: Float[Tensor, "*tokens hidden"],
    update: Float[Tensor, "*tokens hidden"] | None,
    weight: Float[Tensor, "hidden"],
    bias: Float[Tensor, "hidden"] | None,
    eps: float,
    is_rms: bool,
    take_weight: GradientSink | None = None,
    take_bias: GradientSink | None = None,
    magnitudes: Int[Tensor, "parts"] | None = None,
) -> tuple[Float[Tensor, "*tokens hidden"], Float[Tensor, "*tokens hidden"]]:
    """Add an update to the residual stream and normalise the sum; return both, in its dtype.

    Equal to ``stream = hidden + update; (stream, rms_norm(stream) or layer_norm(stream))``, with
    statistics and products in float32. The gradient of the weight is summed in a fixed order.

    Args:
        update: Tensor that is added to the stream; None means that the first result is ``hidden``
            itself.
        take_weight: Function that gets the weight gradient as partial sums, ``(parts, hidden)`` in
            float32; None leaves it to autograd.
        take_bias: Function that gets the bias gradient in the same way; None leaves it to autograd.
        magnitudes: ``MAGNITUDE_PARTS`` bit patterns, the largest of which grows to the largest
            magnitude of the normalised vectors in the same pass; None finds none.
    """
    return _AddNorm.apply(
        hidden, update, weight, bias, eps, is_rms, take_weight, take_bias, magnitudes
    )


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        update: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        is_rms: bool,
        take_weight: GradientSink | None,
        take_bias: GradientSink | None,
        magnitudes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows = as_rows(hidden)
        num_rows, width = rows.shape
        added = rows if update is None else as_rows(update)
        normalised = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        stream = hidden if update is None else torch.empty_like(normalised)
        statistics = torch.empty((2, num_rows), dtype=torch.float32, device=hidden.device)
        mean, inverse = statistics.unbind(0)
        if rows.numel():
            with on_device_of(rows):
                _forward[(num_rows,)](
                    rows, added, weight, weight if bias is None else bias, stream, normalised, mean,
                    inverse, magnitudes, rows.stride(0), added.stride(0), width, eps, IS_RMS=is_rms,
                    HAS_UPDATE=update is not None, HAS_BIAS=bias is not None, **_shape(width),
                    **early_start(hidden.shape[0]),
                )  # fmt: skip
        ctx.save_for_backward(stream, weight, mean, inverse)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.is_rms = is_rms
        ctx.has_update = update is not None
        ctx.take_weight = take_weight
        ctx.take_bias = take_bias
        ctx.set_materialize_grads(False)
        # The result is a view, because autograd treats an input that a function returns itself in a
        # special way.
        return stream.view_as(stream) if update is None else stream, normalised

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        stream, weight, mean, inverse = ctx.saved_tensors
        grad_stream, grad_normalised = grads
        if grad_normalised is None:
            return grad_stream, grad_stream if ctx.has_update else None, *[None] * 7
        rows = as_rows(stream)
        outer = as_rows(grad_normalised)
        residual = outer if grad_stream is None else as_rows(grad_stream)
        num_rows, width = rows.shape
        result = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        programs = min(num_rows, _PROGRAMS)
        has_bias = ctx.bias_dtype is not None
        partial = torch.empty(
            (2 if has_bias else 1, programs, width),
            dtype=torch.float32,
            device=rows.device,
        )
        if rows.numel():
            with on_device_of(rows):
                _backward[(programs,)](
                    rows, weight, mean, inverse, outer, residual, result, partial, rows.stride(0),
                    outer.stride(0), residual.stride(0), num_rows, width, IS_RMS=ctx.is_rms,
                    HAS_RESIDUAL=grad_stream is not None, HAS_BIAS=has_bias, **_shape(width),
                )  # fmt: skip
        grad_weight = _delivered(partial[0], weight.dtype, ctx.take_weight)
        grad_bias = _delivered(partial[1], ctx.bias_dtype, ctx.take_bias) if has_bias else None
        return result, result if ctx.has_update else None, grad_weight, grad_bias, *[None] * 5


def _delivered(parts: Tensor, dtype: torch.dtype, take: GradientSink | None) -> Tensor | None:
    """Pass a gradient to its sink, or return it for autograd if there is none."""
    if take is None:
        return parts.sum(0).to(dtype)
    take(parts)
    return None


def _shape(width: int) -> dict[str, int]:
    """Return the block size and the number of warps: 16 elements a thread, at most 16 warps."""
    block = power_of_two(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


# torch.compile adds a parameter ``stream`` to kernels that it launches, so no parameter may have
# that name.
@triton.jit
def _forward(
    hidden: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    normalised: tl.tensor,
    mean: tl.tensor,
    inverse: tl.tensor,
    magnitudes: tl.tensor,
    hidden_stride: tl.tensor,
    update_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    IS_RMS: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x += tl.load(update + row * update_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        # Normalise the rounded sum, which the next layers read.
        x = rounded.to(tl.float32)
    if not IS_RMS:
        centre = tl.sum(x, axis=0) / width
        tl.store(mean + row, centre)
        x = tl.where(inside, x - centre, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(inverse + row, scale)
    result = x * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = result.to(normalised.dtype.element_ty)
    tl.store(normalised + row * width + columns, result, mask=inside)
    if magnitudes is not None:
        # Lanes outside of the vector hold 0 times the scale, which is infinite for a vector of
        # zeros with eps 0.
        bits = tl.where(inside, magnitude_bits(result), 0)
        note_magnitude(magnitudes, bits, tl.program_id(0))


@triton.jit
def _backward(
    total: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    inverse: tl.tensor,
    outer: tl.tensor,
    residual: tl.tensor,
    result: tl.tensor,
    partial: tl.tensor,
    total_stride: tl.tensor,
    outer_stride: tl.tensor,
    residual_stride: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_RMS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        x = tl.load(total + row * total_stride + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(outer + row * outer_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row)
        if not IS_RMS:
            x = tl.where(inside, x - tl.load(mean + row), 0.0)
        x *= scale
        weight_sum += grad * x
        if HAS_BIAS:
            bias_sum += grad
        grad *= factors
        change = grad - x * (tl.sum(grad * x, axis=0) / width)
        if not IS_RMS:
            change -= tl.sum(grad, axis=0) / width
        change *= scale
        if HAS_RESIDUAL:
            source = residual + row * residual_stride + columns
            change += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + row * width + columns, change.to(result.dtype.element_ty), mask=inside)
    target = partial + tl.program_id(0) * width + columns
    tl.store(target, weight_sum, mask=inside)
    if HAS_BIAS:
        tl.store(target + tl.num_programs(0) * width, bias_sum, mask=inside)
