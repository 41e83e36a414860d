"""SwiGLU, ``silu(gate) * up``, of a fused projection; forward and backward are one pass each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import (
    as_rows,
    ceil_div,
    early_start,
    on_device_of,
    power_of_two,
    wait_early,
)
from lightning_megatron.kernels.triton.magnitudes import magnitude_bits, note_magnitude
from lightning_megatron.plan.fp8 import MAGNITUDE_PARTS
from lightning_megatron.shapes import Float, Int

_BLOCK = 2048
#: Function that gets a gradient and the bit patterns of its magnitude.
MagnitudeSink = Callable[[Tensor, Tensor], None]


def apply_swiglu(
    gate_up: Float[Tensor, "*tokens gate_up"],
    magnitudes: Int[Tensor, "parts"] | None = None,
    take_magnitude: MagnitudeSink | None = None,
) -> Float[Tensor, "*tokens gate_up//2"]:
    """Multiply the SiLU of the first half of the features by the second half.

    Equal to ``silu(gate) * up`` with ``gate, up = gate_up.chunk(2, -1)``, computed in float32 and
    rounded once. Only ``gate_up`` is kept for the backward pass.

    Args:
        magnitudes: ``MAGNITUDE_PARTS`` bit patterns, the largest of which grows to the largest
            magnitude of the output in the same pass; None finds none.
        take_magnitude: Function that gets the gradient of ``gate_up`` and bit patterns, the largest
            of which is its largest magnitude, found in the same pass; None finds none.

    Source: Shazeer 2020.
    """
    return _SwiGLU.apply(gate_up, magnitudes, take_magnitude)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        magnitudes: Tensor | None,
        take_magnitude: MagnitudeSink | None,
    ) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.take_magnitude = take_magnitude
        rows = as_rows(gate_up)
        features = rows.shape[1] // 2
        output = gate_up.new_empty((*gate_up.shape[:-1], features))
        if output.numel():
            block = min(_BLOCK, power_of_two(features))
            with on_device_of(rows):
                _forward[(rows.shape[0], ceil_div(features, block))](
                    rows,
                    output,
                    magnitudes,
                    rows.stride(0),
                    features,
                    BLOCK=block,
                    **early_start(gate_up.shape[0]),
                )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        rows = as_rows(gate_up)
        grad = as_rows(grads[0])
        features = rows.shape[1] // 2
        result = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        magnitudes = None
        if ctx.take_magnitude is not None:
            magnitudes = torch.zeros(MAGNITUDE_PARTS, dtype=torch.int32, device=gate_up.device)
        if result.numel():
            block = min(_BLOCK, power_of_two(features))
            with on_device_of(rows):
                _backward[(rows.shape[0], ceil_div(features, block))](
                    rows,
                    grad,
                    result,
                    magnitudes,
                    rows.stride(0),
                    grad.stride(0),
                    features,
                    BLOCK=block,
                )
        if ctx.take_magnitude is not None:
            ctx.take_magnitude(result, magnitudes)
        return result, None, None


@triton.jit
def _forward(
    gate_up: tl.tensor,
    output: tl.tensor,
    magnitudes: tl.tensor,
    row_stride: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + features, mask=inside, other=0.0).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate)) * up).to(output.dtype.element_ty)
    tl.store(output + row * features + columns, result, mask=inside)
    if magnitudes is not None:
        # Lanes outside of the matrix hold silu(0) * 0 = 0.
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        note_magnitude(magnitudes, magnitude_bits(result), program)


@triton.jit
def _backward(
    gate_up: tl.tensor,
    grad: tl.tensor,
    result: tl.tensor,
    magnitudes: tl.tensor,
    row_stride: tl.tensor,
    grad_stride: tl.tensor,
    features: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + features, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    target = result + row * (2 * features) + columns
    grad_gate = (outer * up * (sigmoid + silu * (1.0 - sigmoid))).to(result.dtype.element_ty)
    grad_up = (outer * silu).to(result.dtype.element_ty)
    tl.store(target, grad_gate, mask=inside)
    tl.store(target + features, grad_up, mask=inside)
    if magnitudes is not None:
        # Outside of the matrix the factors are 0, and so are the gradients.
        bits = tl.maximum(magnitude_bits(grad_gate), magnitude_bits(grad_up))
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        note_magnitude(magnitudes, bits, program)
