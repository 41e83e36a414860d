"""Permutation of tokens to the rows of their experts, and the sum of rows back to tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import language as tl

from lightning_megatron.kernels.triton.launch import as_rows, ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Float, Int

_BLOCK = 1024


def permute_tokens(
    hidden: Float[Tensor, "tokens hidden"],
    probabilities: Float[Tensor, "tokens top_k"] | None,
    rows: Int[Tensor, "tokens top_k"],
    ends: Int[Tensor, "experts"],
    num_rows: int,
) -> tuple[Float[Tensor, "{num_rows} hidden"], Float[Tensor, "{num_rows}"] | None]:
    """Copy every token, and the probabilities of its selections, into the rows of the selections.

    Equal to ``result[rows[t, j]] = hidden[t]`` and ``scales[rows[t, j]] = probabilities[t, j]`` for
    all rows before the last end. Rows past the last end are undefined. The gradient of a token is
    summed in float32.

    Args:
        rows: Row of every selection; past the last end for selections without a row.
        ends: End (exclusive) of the rows of every expert, on the device.
    """
    return _Permute.apply(hidden, probabilities, rows, ends, num_rows)


def unpermute_rows(
    values: Float[Tensor, "rows hidden"],
    rows: Int[Tensor, "tokens top_k"],
    ends: Int[Tensor, "experts"],
) -> Float[Tensor, "tokens hidden"]:
    """Sum the rows of a token's selections in float32.

    Rows past the last end are not read.

    Args:
        rows: Row of every selection; past the last end for selections without a row.
        ends: End (exclusive) of the rows of every expert, on the device.
    """
    return _Unpermute.apply(values, rows, ends)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        probabilities: Tensor | None,
        rows: Tensor,
        ends: Tensor,
        num_rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(rows, ends)
        return _spread(hidden, probabilities, rows, ends, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        grad_hidden, grad_probabilities = _collect(grads[0], rows, ends, grads[1])
        return grad_hidden, grad_probabilities, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.num_rows = values.shape[0]
        return _collect(values, rows, ends)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends = ctx.saved_tensors
        return _spread(grads[0], None, rows, ends, ctx.num_rows)[0], None, None


def _block(width: int) -> int:
    return min(_BLOCK, power_of_two(width))


def _spread(
    source: Tensor,
    probabilities: Tensor | None,
    rows: Tensor,
    ends: Tensor,
    num_rows: int,
) -> tuple[Tensor, Tensor | None]:
    """Copy tokens, and probabilities if given, to the rows of their selections."""
    source = as_rows(source)
    width = source.shape[1]
    result = source.new_empty((num_rows, width))
    scales = None if probabilities is None else probabilities.new_empty(num_rows)
    # The kernel does not access a tensor that replaces None.
    probabilities_read = rows if probabilities is None else probabilities.contiguous()
    scales_written = result if scales is None else scales
    if rows.numel():
        with on_device_of(source):
            _spread_rows[(rows.shape[0], ceil_div(width, _block(width)))](
                source, result, probabilities_read, scales_written, rows, ends, source.stride(0),
                width, num_rows, ends.shape[0], K=rows.shape[1], HAS_SCALES=scales is not None,
                PADDED_K=power_of_two(rows.shape[1]), BLOCK=_block(width),
            )  # fmt: skip
    return result, scales


def _collect(
    values: Tensor, rows: Tensor, ends: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of every token's selections, and gather the scales of the rows if given."""
    values = as_rows(values)
    width = values.shape[1]
    result = values.new_empty((rows.shape[0], width))
    gathered = None if scales is None else scales.new_empty(rows.shape)
    # The kernel does not access a tensor that replaces None.
    scales_read = result if scales is None else scales.contiguous()
    scales_written = result if gathered is None else gathered
    if rows.numel():
        with on_device_of(values):
            _collect_rows[(rows.shape[0], ceil_div(width, _block(width)))](
                values, result, scales_read, scales_written, rows, ends, values.stride(0), width,
                values.shape[0], ends.shape[0], K=rows.shape[1], HAS_SCALES=scales is not None,
                PADDED_K=power_of_two(rows.shape[1]), BLOCK=_block(width),
            )  # fmt: skip
    return result, gathered


@triton.jit
def _spread_rows(
    source: tl.tensor,
    result: tl.tensor,
    probabilities: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    source_stride: tl.tensor,
    width: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    end = tl.minimum(tl.load(ends + num_experts - 1), num_rows)
    x = tl.load(source + token * source_stride + columns, mask=inside)
    if HAS_SCALES:
        selections = tl.arange(0, PADDED_K)
        is_first = (selections < K) & (tl.program_id(1) == 0)
        row = tl.load(rows + token * K + selections, mask=is_first, other=0)
        probability = tl.load(probabilities + token * K + selections, mask=is_first)
        tl.store(scales + row, probability, mask=is_first & (row < end))
    for selection in tl.static_range(K):
        row = tl.load(rows + token * K + selection)
        tl.store(result + row * width + columns, x, mask=inside & (row < end))


@triton.jit
def _collect_rows(
    values: tl.tensor,
    result: tl.tensor,
    scales: tl.tensor,
    gathered: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    value_stride: tl.tensor,
    width: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    end = tl.minimum(tl.load(ends + num_experts - 1), num_rows)
    if HAS_SCALES:
        selections = tl.arange(0, PADDED_K)
        is_first = (selections < K) & (tl.program_id(1) == 0)
        row = tl.load(rows + token * K + selections, mask=is_first, other=0)
        scale = tl.load(scales + row, mask=is_first & (row < end), other=0.0)
        tl.store(gathered + token * K + selections, scale, mask=is_first)
    total = tl.zeros((BLOCK,), tl.float32)
    for selection in tl.static_range(K):
        row = tl.load(rows + token * K + selection)
        x = tl.load(values + row * value_stride + columns, mask=inside & (row < end), other=0.0)
        total += x.to(tl.float32)
    tl.store(result + token * width + columns, total.to(result.dtype.element_ty), mask=inside)
