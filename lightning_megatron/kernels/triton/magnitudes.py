"""Largest magnitudes of matrices, of their rows and of their columns.

Magnitudes are bit patterns of float32 numbers as integers: they have the order of the numbers, and
NaN is the largest of all, so that a maximum never loses one.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of
from lightning_megatron.plan.fp8 import MAGNITUDE_PARTS
from lightning_megatron.shapes import Float, Int

#: Rows and columns of the part of a matrix that a program reads.
TILE = 128
_BLOCK = 8192
_MAX_PARTS = 512
#: Smaller magnitudes count as this one, whose inverse is a float32 number.
_MIN_MAGNITUDE = tl.constexpr(1e-30)
_PARTS = tl.constexpr(MAGNITUDE_PARTS)


def magnitude_parts(matrix: Float[Tensor, "rows columns"]) -> Int[Tensor, "parts"]:
    """Return bit patterns whose maximum is the largest magnitude of a contiguous matrix.

    Each part is the maximum of some of the numbers, so that no program waits for another.
    """
    num_elements = matrix.numel()
    count = max(1, min(_MAX_PARTS, ceil_div(num_elements, _BLOCK)))
    parts = matrix.new_empty(count, dtype=torch.int32)
    with on_device_of(matrix):
        _magnitudes[(count,)](matrix, parts, num_elements, count, BLOCK=_BLOCK, num_warps=8)
    return parts


def line_magnitudes(
    matrix: Float[Tensor, "rows columns"], *, of_rows: bool, of_columns: bool
) -> tuple[Int[Tensor, "rows"] | None, Int[Tensor, "columns"] | None]:
    """Return bit patterns of the largest magnitudes of a contiguous matrix's rows and columns."""
    rows, columns = matrix.shape
    tiles = ceil_div(rows, TILE), ceil_div(columns, TILE)
    new = matrix.new_empty
    by_row = new((tiles[1], rows) if of_rows else (0,), dtype=torch.int32)
    by_column = new((tiles[0], columns) if of_columns else (0,), dtype=torch.int32)
    with on_device_of(matrix):
        _line_magnitudes[tiles](
            matrix, by_row, by_column, rows, columns, of_rows, of_columns, TILE=TILE, num_warps=8
        )
    found_rows = by_row.amax(0) if of_rows else None
    found_columns = by_column.amax(0) if of_columns else None
    return found_rows, found_columns


@triton.jit
def magnitude_bits(values: tl.tensor) -> tl.tensor:
    """Return the bit patterns of magnitudes."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def note_magnitude(
    magnitudes: tl.tensor,
    bits: tl.tensor,
    program: tl.tensor,
) -> None:
    """Let one of ``MAGNITUDE_PARTS`` bit patterns grow to the largest one of a block."""
    tl.atomic_max(magnitudes + program % _PARTS, tl.max(bits, 0), sem="relaxed")


@triton.jit
def magnitude_of(bits: tl.tensor) -> tl.tensor:
    """Return magnitudes as numbers, at least the smallest one that counts."""
    magnitude = bits.to(tl.float32, bitcast=True)
    # A comparison with NaN is false, so that it stays.
    return tl.where(magnitude < _MIN_MAGNITUDE, _MIN_MAGNITUDE, magnitude)


@triton.jit
def load_tile(
    matrix: tl.tensor, rows: tl.tensor, columns: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the part of a matrix that this program reads, with its row and column numbers."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32), row, column


@triton.jit
def _magnitudes(
    matrix: tl.tensor,
    parts: tl.tensor,
    num_elements: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(program, tl.cdiv(num_elements, BLOCK), count):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, magnitude_bits(tl.load(matrix + at, mask=at < num_elements, other=0.0))
        )
    tl.store(parts + program, tl.max(largest, 0))


@triton.jit
def _line_magnitudes(
    matrix: tl.tensor,
    by_row: tl.tensor,
    by_column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    of_rows: tl.constexpr,
    of_columns: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    values, row, column = load_tile(matrix, rows, columns, TILE)
    bits = magnitude_bits(values)
    if of_rows:
        tl.store(by_row + tl.program_id(1) * rows + row, tl.max(bits, 1), mask=row < rows)
    if of_columns:
        target = by_column + tl.program_id(0) * columns + column
        tl.store(target, tl.max(bits, 0), mask=column < columns)
