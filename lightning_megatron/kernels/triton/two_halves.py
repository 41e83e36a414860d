"""Numbers of half types: sums of two that give a float32 number, for precise matrix products, and
pairs of numbers as words of 4 bytes.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of
from lightning_megatron.shapes import Float

_BLOCK = 1024


def split_rows(
    values: Float[Tensor, "rows hidden"], parts: Float[Tensor, "rows 2 hidden"]
) -> Float[Tensor, "rows 2 hidden"]:
    """Fill ``parts`` with the rounded numbers and the rounding errors, and return it.

    Equal to ``parts[:, 0] = values; parts[:, 1] = values - parts[:, 0]``. The values are float32,
    and the parts are contiguous and of a half type.
    """
    values = values.contiguous()
    num_elements = values.numel()
    if num_elements:
        with on_device_of(values):
            _split_rows[(ceil_div(num_elements, _BLOCK),)](
                values,
                parts,
                num_elements,
                values.shape[1],
                BLOCK=_BLOCK,
            )
    return parts


@triton.jit
def _split_rows(
    values: tl.tensor,
    parts: tl.tensor,
    num_elements: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    x = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    high = x.to(parts.dtype.element_ty)
    # Row n of the values fills the rows 2 n and 2 n + 1 of the parts.
    target = parts + at + at // width * width
    tl.store(target, high, mask=inside)
    tl.store(target + width, (x - high.to(tl.float32)).to(parts.dtype.element_ty), mask=inside)


@triton.jit
def unpack_halves(words: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the first and second number of every int32 word, in float32; ``like`` has their half
    type.
    """
    low = (words & 0xFFFF).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    high = (words >> 16).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def pack_halves(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return an int32 word for every pair of numbers of a half type."""
    first = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | first
