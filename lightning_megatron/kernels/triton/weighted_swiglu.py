"""SwiGLU times a probability per row, for a number of rows that only the device knows.

A fixed number of programs loops over the rows, so rows past the end cost nothing.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from lightning_megatron.kernels.triton.launch import as_rows, ceil_div, on_device_of, power_of_two
from lightning_megatron.plan.model_shape import FEATURE_LIMIT, GATE_FACTOR
from lightning_megatron.shapes import Float, Int

# Gate elements in one iteration of a program.
_BLOCK = 1024
# Smallest number of columns in an iteration over several rows.
_MIN_COLUMNS = 128
# Sixty-four for every multiprocessor of an H200.
_PROGRAMS = 8448
#: Factor of the gate inside the sigmoid, offset of the other half, and bound; 0 means none.
_DEFAULT_CONSTANTS = {"FACTOR": 1.0, "OFFSET": 0.0, "LIMIT": 0.0}
_CLAMPED = {"FACTOR": GATE_FACTOR, "OFFSET": 1.0, "LIMIT": FEATURE_LIMIT}


def apply_weighted_swiglu(
    gate_up: Float[Tensor, "rows gate_up"],
    probabilities: Float[Tensor, "rows"],
    ends: Int[Tensor, "experts"],
    computed: Float[Tensor, "rows gate_up//2"] | None = None,
) -> Float[Tensor, "rows gate_up//2"]:
    """Apply SwiGLU and multiply every row by its probability.

    Equal to ``silu(gate) * up * probability`` with ``gate, up = gate_up.chunk(2, -1)``, computed in
    float32 and rounded once, for all rows before the last end. Rows past the last end are neither
    read nor written, forward and backward. Their values in the output and in gradients are
    undefined.

    Args:
        ends: End (exclusive) of the rows of every expert, on the device.
        computed: The output, if the kernel of ``gate_up`` has already computed it. This function
            then only attaches the gradients.

    Source: Shazeer 2020.
    """
    return _WeightedSwiGLU.apply(
        gate_up, probabilities, ends, None if computed is None else (computed,), _DEFAULT_CONSTANTS
    )


def apply_weighted_clamped_swiglu(
    gate_up: Float[Tensor, "rows gate_up"],
    probabilities: Float[Tensor, "rows"],
    ends: Int[Tensor, "experts"],
) -> Float[Tensor, "rows gate_up//2"]:
    """Apply the bounded SwiGLU of gpt-oss and multiply every row by its probability.

    Equal to ``gate * sigmoid(1.702 * gate) * (up + 1) * probability`` with ``gate`` at most 7 and
    ``up`` between -7 and 7, under the rules of :func:`apply_weighted_swiglu`.
    """
    return _WeightedSwiGLU.apply(gate_up, probabilities, ends, None, _CLAMPED)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        probabilities: Tensor,
        ends: Tensor,
        computed: tuple[Tensor] | None,
        kind: dict[str, float],
    ) -> Tensor:
        ctx.save_for_backward(gate_up, probabilities, ends)
        ctx.kind = kind
        if computed is not None:  # in a tuple, so that autograd does not treat it as an input
            return computed[0]
        rows = as_rows(gate_up)
        features = gate_up.shape[1] // 2
        output = gate_up.new_empty((rows.shape[0], features))
        if output.numel():
            with on_device_of(rows):
                _weighted_swiglu_forward[_grid(rows.shape[0], features)](
                    rows, probabilities.contiguous(), ends, output, rows.stride(0), rows.shape[0],
                    features, ends.shape[0], **_shape(features), **kind,
                )  # fmt: skip
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, probabilities, ends = ctx.saved_tensors
        rows = as_rows(gate_up)
        grad = as_rows(grads[0])
        features = gate_up.shape[1] // 2
        grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        grad_probabilities = torch.empty(
            probabilities.shape,
            dtype=probabilities.dtype,
            device=rows.device,
        )
        if grad_rows.numel():
            with on_device_of(rows):
                _weighted_swiglu_backward[_grid(rows.shape[0], features)](
                    rows, probabilities.contiguous(), ends, grad, grad_rows, grad_probabilities,
                    rows.stride(0), grad.stride(0), rows.shape[0], features, ends.shape[0],
                    **_shape(features), **ctx.kind,
                )  # fmt: skip
        return grad_rows, grad_probabilities, None, None, None


def _shape(features: int) -> dict[str, int]:
    """Return the numbers of rows and columns in one iteration of a program."""
    # If the columns divide the features, no thread is idle.
    columns = gcd(features, _BLOCK)
    if columns < _MIN_COLUMNS:
        columns = min(_BLOCK, power_of_two(features))
    return {"ROWS": _BLOCK // columns, "COLUMNS": columns}


def _grid(num_rows: int, features: int) -> tuple[int]:
    return (min(ceil_div(num_rows, _shape(features)["ROWS"]), _PROGRAMS),)


@triton.jit
def _weighted_swiglu_forward(
    gate_up: tl.tensor,
    probabilities: tl.tensor,
    ends: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    features: tl.tensor,
    num_experts: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    end = tl.minimum(tl.load(ends + num_experts - 1), num_rows)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        probability = tl.load(probabilities + row, mask=row < end, other=0.0)
        for start in range(0, features, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (columns < features)[None, :]
            source = gate_up + row[:, None] * row_stride + columns[None, :]
            gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(source + features, mask=inside, other=0.0).to(tl.float32)
            if LIMIT > 0:
                gate = tl.minimum(gate, LIMIT)
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            glu = gate / (1.0 + tl.exp(-FACTOR * gate))
            result = glu * (up + OFFSET) * probability[:, None]
            target = output + row[:, None] * features + columns[None, :]
            tl.store(target, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_swiglu_backward(
    gate_up: tl.tensor,
    probabilities: tl.tensor,
    ends: tl.tensor,
    grad: tl.tensor,
    grad_rows: tl.tensor,
    grad_probabilities: tl.tensor,
    row_stride: tl.tensor,
    grad_stride: tl.tensor,
    num_rows: tl.tensor,
    features: tl.tensor,
    num_experts: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    end = tl.minimum(tl.load(ends + num_experts - 1), num_rows)
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        probability = tl.load(probabilities + row, mask=row < end, other=0.0)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, features, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = (row < end)[:, None] & (columns < features)[None, :]
            source = gate_up + row[:, None] * row_stride + columns[None, :]
            gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(source + features, mask=inside, other=0.0).to(tl.float32)
            outer = tl.load(
                grad + row[:, None] * grad_stride + columns[None, :],
                mask=inside,
                other=0.0,
            )
            outer = outer.to(tl.float32)
            raw_gate = gate
            raw_up = up
            if LIMIT > 0:
                gate = tl.minimum(gate, LIMIT)
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            sigmoid = 1.0 / (1.0 + tl.exp(-FACTOR * gate))
            glu = gate * sigmoid
            total += outer * glu * (up + OFFSET)
            outer *= probability[:, None]
            grad_gate = outer * (up + OFFSET) * (sigmoid + FACTOR * glu * (1.0 - sigmoid))
            grad_up = outer * glu
            if LIMIT > 0:
                # Bounded features have no gradient.
                grad_gate = tl.where(raw_gate <= LIMIT, grad_gate, 0.0)
                grad_up = tl.where(tl.abs(raw_up) <= LIMIT, grad_up, 0.0)
            target = grad_rows + row[:, None] * (2 * features) + columns[None, :]
            tl.store(target, grad_gate.to(grad_rows.dtype.element_ty), mask=inside)
            tl.store(target + features, grad_up.to(grad_rows.dtype.element_ty), mask=inside)
        tl.store(grad_probabilities + row, tl.sum(total, axis=1), mask=row < end)
