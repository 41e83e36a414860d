"""Casts to 8 bits by operators of torch, with the names and results of the fused kernels.

``kernels.triton.magnitudes`` and ``kernels.triton.eight_bits`` describe the functions in detail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.plan.fp8 import BLOCK
from lightning_megatron.shapes import Float, Int, Shaped

#: Smaller magnitudes are replaced by this one, whose inverse is a finite float32 number.
_LEAST = 1e-30
#: A matrix in an 8-bit dtype, and its scales.
Cast = tuple[Tensor, Tensor]


def magnitude_parts(matrix: Float[Tensor, "rows columns"]) -> Int[Tensor, "parts"]:
    """Return the bit pattern of the largest magnitude of a matrix."""
    return _bits(_largest(matrix, (0, 1)).reshape(1))


def line_magnitudes(
    matrix: Float[Tensor, "rows columns"], *, of_rows: bool, of_columns: bool
) -> tuple[Int[Tensor, "rows"] | None, Int[Tensor, "columns"] | None]:
    """Return the bit patterns of the largest magnitude of each row and column."""
    by_row = _bits(_largest(matrix, (1,))) if of_rows else None
    by_column = _bits(_largest(matrix, (0,))) if of_columns else None
    return by_row, by_column


def cast_by_one_scale(
    matrix: Float[Tensor, "rows columns"],
    parts: Int[Tensor, "parts"],
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    multiple: int,
    running_magnitude: Int[Tensor, ""] | None = None,
) -> tuple[Cast | None, Cast | None]:
    """Cast a matrix with one scale, which follows from the largest of the given magnitudes."""
    if running_magnitude is not None:
        running_magnitude.copy_(torch.maximum(running_magnitude, magnitude_parts(matrix)[0]))
    magnitude = _magnitudes(parts.amax().reshape(1))
    values = _cast(matrix, magnitude, dtype)
    scale = magnitude / torch.finfo(dtype).max
    by_rows = (values, scale) if rows else None
    by_columns = (padded_transpose(values, multiple), scale) if columns else None
    return by_rows, by_columns


def cast_by_lines(
    matrix: Float[Tensor, "rows columns"],
    row_magnitudes: Int[Tensor, "rows"] | None,
    column_magnitudes: Int[Tensor, "columns"] | None,
    dtype: torch.dtype,
    *,
    multiple: int,
) -> tuple[Cast | None, Cast | None]:
    """Cast a matrix with a scale for each row, and its transpose with a scale for each row."""
    largest = torch.finfo(dtype).max
    rows = columns = None
    if row_magnitudes is not None:
        magnitude = _magnitudes(row_magnitudes)[:, None]
        rows = _cast(matrix, magnitude, dtype), magnitude / largest
    if column_magnitudes is not None:
        magnitude = _magnitudes(column_magnitudes)[:, None]
        values = _cast(matrix, magnitude.t(), dtype)
        columns = padded_transpose(values, multiple), magnitude / largest
    return rows, columns


def cast_by_blocks(
    matrix: Float[Tensor, "rows columns"],
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    is_square: bool,
) -> tuple[Cast | None, Cast | None]:
    """Cast a matrix with one scale for each block: 128 elements of a row, or 128 x 128 elements."""
    flipped = None
    if columns:
        values, scale = _cast_blocks(matrix.t(), dtype, is_square)
        flipped = padded_transpose(values.view(torch.uint8).t().view(dtype), BLOCK), scale
    return _cast_blocks(matrix, dtype, is_square) if rows else None, flipped


def padded_transpose(
    matrix: Shaped[Tensor, "rows columns"], multiple: int
) -> Shaped[Tensor, "columns padded"]:
    """Return the transpose of a matrix in an 8-bit dtype.

    The length of its rows is padded by zeros to a multiple of ``multiple``.
    """
    bits = matrix.view(torch.uint8).t()
    return F.pad(bits, (0, -len(matrix) % multiple)).contiguous().view(matrix.dtype)


def scales_of(magnitudes: Int[Tensor, "weights"], dtype: torch.dtype) -> Float[Tensor, "weights"]:
    """Return the scales with which casts map the given magnitudes to the largest 8-bit number."""
    return _magnitudes(magnitudes) / torch.finfo(dtype).max


class SliceCasts:
    """Casts of slices of weights, each with the scale of its whole weight.

    Equal to the slices of ``cast_by_one_scale`` of the whole weights.

    Args:
        main: Values of all slices.
        target: Memory into which :meth:`cast` writes the bit patterns of 8-bit values.
        slices: Start in ``main``, start in ``target``, size and index of the weight of each slice
            (elements).
    """

    def __init__(
        self,
        main: Float[Tensor, "_"],
        target: Shaped[Tensor, "_"],
        slices: Sequence[tuple[int, int, int, int]],
    ) -> None:
        self._slices = [
            (main[start : start + size], target[place : place + size], weight)
            for start, place, size, weight in slices
        ]

    def find(self, magnitudes: Int[Tensor, "weights"]) -> None:
        """Set each weight's bit pattern to the largest magnitude in its slices; 0 without any."""
        magnitudes.zero_()
        for numbers, _, weight in self._slices:
            magnitude = magnitude_parts(numbers[None])[0]
            magnitudes[weight] = torch.maximum(magnitudes[weight], magnitude)

    def cast(self, magnitudes: Int[Tensor, "weights"], dtype: torch.dtype) -> None:
        """Cast all slices with scales from the given magnitudes of whole weights."""
        for numbers, place, weight in self._slices:
            values = _cast(numbers, _magnitudes(magnitudes[weight]), dtype)
            place.copy_(values.view(torch.uint8))


def _cast_blocks(matrix: Tensor, dtype: torch.dtype, is_square: bool) -> Cast:
    rows, columns = matrix.shape
    height = BLOCK if is_square else 1
    padded = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))
    magnitude = _magnitudes(_bits(_largest(blocks, (1, 3), keepdim=True)))
    values = _cast(blocks, magnitude, dtype).view(torch.uint8)
    values = values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous().view(dtype)
    scale = magnitude[:, 0, :, 0] / torch.finfo(dtype).max
    # Products read scales of row blocks in column-major order.
    return values, scale.contiguous() if is_square else scale.t().contiguous().t()


def _largest(matrix: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    if not matrix.numel():
        return matrix.sum(dims, keepdim)
    return matrix.abs().amax(dims, keepdim)


def _bits(magnitudes: Tensor) -> Tensor:
    return magnitudes.float().view(torch.int32)


def _magnitudes(bits: Tensor) -> Tensor:
    magnitude = bits.view(torch.float32)
    # A comparison with NaN is false, so NaN is not replaced.
    return torch.where(magnitude < _LEAST, _LEAST, magnitude)


def _cast(matrix: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    largest = torch.finfo(dtype).max
    scaled = (wide * (largest / magnitude)).clamp(-largest, largest)
    # An infinite element becomes NaN, not the largest number.
    return torch.where(wide.isinf(), torch.nan, scaled).to(dtype)
