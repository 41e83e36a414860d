"""Cross entropy over a shard of the vocabulary, without a float32 copy of the logits."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import as_rows, ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Float, Int

_FORWARD_BLOCK = 8192
_BACKWARD_BLOCK = 4096


def cross_entropy_statistics(
    logits: Float[Tensor, "*tokens vocab_local"],
    index: Int[Tensor, "*tokens"],
    num_valid: int,
    with_sum: bool,
) -> tuple[
    Float[Tensor, "*tokens"],
    Float[Tensor, "*tokens"],
    Float[Tensor, "*tokens"],
    Float[Tensor, "*tokens"],
]:
    """Compute the row statistics of a cross entropy in one pass over the logits.

    Equal to ``x.amax(-1)``, ``(x - x.amax(-1)).exp().sum(-1)``, the logit of the label and
    ``x.sum(-1)``, where x is the first ``num_valid`` columns in float32. Without valid columns the
    results are -inf, 0, 0, 0.

    The results are float32.

    Args:
        index: Column of each label; negative for labels of other shards, whose logit is 0.
        num_valid: Number of columns without the padding after them (columns).
        with_sum: Whether to compute the sum of the logits; it is 0 otherwise.
    """
    rows = as_rows(logits)
    labels = index.contiguous()
    results = torch.empty((4, *index.shape), dtype=torch.float32, device=logits.device)
    if index.numel():
        block = min(_FORWARD_BLOCK, power_of_two(max(num_valid, 128)))
        with on_device_of(rows):
            _statistics[(rows.shape[0],)](
                rows, labels, results, rows.stride(0), rows.shape[0], rows.shape[1], num_valid,
                WITH_SUM=with_sum, BLOCK=block, num_warps=8 if block > 2048 else 4,
            )  # fmt: skip
    largest, total, target, logit_sum = results.unbind(0)
    return largest, total, target, logit_sum


def cross_entropy_gradient(
    logits: Float[Tensor, "*tokens vocab_local"],
    index: Int[Tensor, "*tokens"],
    normaliser: Float[Tensor, "*tokens"],
    scale: Float[Tensor, "*tokens"],
    num_valid: int,
    smoothing: float,
    vocab_size: int,
    overwrite: bool,
) -> Float[Tensor, "*tokens vocab_local"]:
    """Compute the gradient of the logits in one pass.

    Equal to ``scale * (softmax - smoothing / vocab_size - (1 - smoothing) * one_hot)``. The
    gradient is 0 in padded columns and in rows whose scale is 0. These rows are not read.

    Args:
        index: Column of each label; negative for labels of other shards.
        normaliser: Logarithm of the sum of exponentials over all shards, in float32.
        scale: Gradient of each loss in float32; 0 for ignored labels.
        num_valid: Number of columns without padding (columns).
        smoothing: Probability that is spread over the vocabulary.
        overwrite: Whether the result may use the memory of the logits, if they are contiguous.
    """
    rows = as_rows(logits)
    if overwrite and logits.is_contiguous():
        result = logits.detach()
    else:
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if result.numel():
        width = rows.shape[1]
        block = min(_BACKWARD_BLOCK, power_of_two(width))
        with on_device_of(rows):
            _gradient[(rows.shape[0], ceil_div(width, block))](
                rows, index.contiguous(), normaliser.contiguous(), scale.contiguous(), result,
                rows.stride(0), width, num_valid, smoothing / vocab_size, 1.0 - smoothing,
                BLOCK=block,
            )  # fmt: skip
    return result


@triton.jit
def _statistics(
    logits: tl.tensor,
    index: tl.tensor,
    results: tl.tensor,
    row_stride: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    num_valid: tl.tensor,
    WITH_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    largest = tl.full((), float("-inf"), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        valid = columns < num_valid
        # The load covers the padding too: its mask ends at a multiple of 16, which keeps memory
        # accesses wide.
        x = tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32)
        if WITH_SUM:
            sums += tl.where(valid, x, 0.0)
        x = tl.where(valid, x, float("-inf"))
        # Online softmax: rescale the sums when a larger logit is found.
        peak = tl.maximum(largest, tl.max(x, axis=0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        totals = totals * tl.exp(largest - base) + tl.exp(x - base)
        largest = peak
    column = tl.load(index + row)
    target = tl.load(source + column, mask=column >= 0, other=0.0).to(tl.float32)
    target_at = results + row
    tl.store(target_at, largest)
    tl.store(target_at + num_rows, tl.sum(totals, axis=0))
    tl.store(target_at + 2 * num_rows, target)
    tl.store(target_at + 3 * num_rows, tl.sum(sums, axis=0))


@triton.jit
def _gradient(
    logits: tl.tensor,
    index: tl.tensor,
    normaliser: tl.tensor,
    scale: tl.tensor,
    result: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    num_valid: tl.tensor,
    floor: tl.tensor,
    peak: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    target = result + row * width + columns
    factor = tl.load(scale + row)
    if factor == 0.0:
        tl.store(target, tl.zeros((BLOCK,), result.dtype.element_ty), mask=inside)
    else:
        x = tl.load(logits + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.exp(x - tl.load(normaliser + row)) - floor
        grad = tl.where(columns == tl.load(index + row), grad - peak, grad) * factor
        grad = tl.where(columns < num_valid, grad, 0.0)
        tl.store(target, grad.to(result.dtype.element_ty), mask=inside)
