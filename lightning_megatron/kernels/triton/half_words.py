"""Pairs of numbers of a half type as words of 4 bytes."""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def unpack_halves(words: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the first and the second number of every word, in float32.

    Args:
        words: Words, as int32.
        like: Tensor or pointer with the half type of the numbers.
    """
    low = (words & 0xFFFF).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    high = (words >> 16).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def pack_halves(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return a word, as int32, for every pair of numbers.

    Args:
        low: First numbers, of a half type.
        high: Second numbers, of the same type.
    """
    first = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | first
