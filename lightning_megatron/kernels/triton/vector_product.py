"""Product of a weight and one vector, at the speed at which memory delivers the weight."""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lightning_megatron.kernels.triton.early_start import early_start
from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of, power_of_two
from lightning_megatron.shapes import Float

#: Elements of the weight that a program reads at once, and how many of them are of one row.
#: Programs are small, so that all multiprocessors read even a weight of a few MB.
_BLOCK = 4096
_BLOCK_IN = 2048
_WARPS = 4
#: Largest input of which a program has several rows.
_WIDE = 16384


def multiply_vector(
    vector: Float[Tensor, "in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, "out_features"] | None,
    *,
    is_stored: bool,
) -> Float[Tensor, "out_features"]:
    """Return the product of a weight and a vector, plus a bias, rounded once.

    Equal to ``linear(vector, weight, bias)``, summed in float32. There is no gradient.

    Args:
        vector: Contiguous vector.
        weight: Contiguous weight.
        bias: Contiguous bias; None means none.
        is_stored: Whether the weight is stored, and not computed by the previous kernel. In a
            captured pass, the kernel then reads it before the previous kernel has ended.
    """
    num_out, num_in = weight.shape
    block_in = min(_BLOCK_IN, power_of_two(num_in))
    # A program holds its part of the weight in registers.
    block_out = _BLOCK // block_in if num_in <= _WIDE else 1
    result = vector.new_empty(num_out)
    with on_device_of(vector):
        options = early_start(1 if is_stored else None)
        _multiply[(ceil_div(num_out, block_out),)](
            vector, weight, result if bias is None else bias, result, num_out, NUM_IN=num_in,
            HAS_BIAS=bias is not None, BLOCK_OUT=block_out, BLOCK_IN=block_in, num_warps=_WARPS,
            **options,
        )  # fmt: skip
    return result


@triton.jit
def _multiply(
    vector: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    result: tl.tensor,
    num_out: tl.tensor,
    NUM_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    lanes = tl.arange(0, BLOCK_IN)
    rows = weight + outs.to(tl.int64)[:, None] * NUM_IN
    has_row = outs < num_out
    # A stored weight does not depend on the previous kernel, so all of its reads are in flight
    # before this kernel waits for the vector.
    parts = ()
    for start in tl.static_range(0, NUM_IN, BLOCK_IN):
        columns = start + lanes
        inside = columns < NUM_IN
        part = tl.load(rows + columns[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]
    if EARLY:
        gdc_wait()
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for index in tl.static_range(0, triton.cdiv(NUM_IN, BLOCK_IN)):
        columns = index * BLOCK_IN + lanes
        values = tl.load(vector + columns, mask=columns < NUM_IN, other=0.0)
        total += parts[index].to(tl.float32) * values.to(tl.float32)[None, :]
    sums = tl.sum(total, 1)
    if HAS_BIAS:
        sums += tl.load(bias + outs, mask=has_row, other=0.0).to(tl.float32)
    tl.store(result + outs, sums.to(result.dtype.element_ty), mask=has_row)
