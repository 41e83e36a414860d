"""Casts of matrices to 8 bits, with their transposes in the same pass.

A scale is a magnitude divided by the largest number of the format. Finite numbers beyond that
magnitude become the largest number, and infinite numbers become NaN. If the magnitude is infinite
or NaN, all numbers that share its scale are NaN in every product.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of, power_of_two
from lightning_megatron.kernels.triton.magnitudes import (
    TILE,
    load_tile,
    magnitude_bits,
    magnitude_of,
)
from lightning_megatron.shapes import Float, Int

#: Largest number of each format.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


#: A matrix of 8 bits, and its scales.
Cast = tuple[Tensor, Tensor]


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
    """Cast a contiguous matrix with one scale, that of the largest of some magnitudes.

    The results are the matrix and the transposed one, whose rows are padded with 0, each with its
    scale; None for what was not asked for by ``rows`` and ``columns``.

    Args:
        parts: Bit patterns of magnitudes.
        multiple: Number that the rows of the transposed matrix are padded to a multiple of.
        running_magnitude: Bit pattern of a magnitude, which the same pass raises to the largest
            magnitude of the matrix if that is larger; None skips this.
    """
    result = _new(matrix, dtype, rows=rows, columns=columns, multiple=multiple)
    scale = matrix.new_empty(1, dtype=torch.float32)
    with on_device_of(matrix):
        _cast_by_one_scale[_tiles(matrix, result)](
            matrix,
            parts,
            result[0],
            result[1],
            scale,
            running_magnitude,
            *matrix.shape,
            _padded(matrix, multiple),
            len(parts),
            LARGEST[dtype],
            rows,
            columns,
            PARTS=power_of_two(len(parts)),
            TILE=TILE,
            num_warps=8,
        )
    return _casts(result, scale, scale, rows, columns)


def cast_by_lines(
    matrix: Float[Tensor, "rows columns"],
    row_magnitudes: Int[Tensor, "rows"] | None,
    column_magnitudes: Int[Tensor, "columns"] | None,
    dtype: torch.dtype,
    *,
    multiple: int,
) -> tuple[Cast | None, Cast | None]:
    """Cast a contiguous matrix with a scale for each row, and its transpose with one for each row.

    Shapes: scales ``(rows, 1)`` and ``(columns, 1)``.

    Args:
        row_magnitudes: Bit patterns of the magnitudes of the rows; None if the matrix is not
            needed.
        column_magnitudes: Those of the columns; None if the transposed matrix is not needed.
        multiple: Number that the rows of the transposed matrix are padded to a multiple of.
    """
    has_rows = row_magnitudes is not None
    has_columns = column_magnitudes is not None
    result = _new(matrix, dtype, rows=has_rows, columns=has_columns, multiple=multiple)
    row_scale = matrix.new_empty((matrix.shape[0] if has_rows else 0, 1), dtype=torch.float32)
    column_scale = matrix.new_empty((matrix.shape[1] if has_columns else 0, 1), dtype=torch.float32)
    with on_device_of(matrix):
        _cast_by_lines[_tiles(matrix, result)](
            matrix,
            row_magnitudes,
            column_magnitudes,
            result[0],
            result[1],
            row_scale,
            column_scale,
            *matrix.shape,
            _padded(matrix, multiple),
            LARGEST[dtype],
            has_rows,
            has_columns,
            TILE=TILE,
            num_warps=8,
        )
    return _casts(result, row_scale, column_scale, has_rows, has_columns)


def cast_by_blocks(
    matrix: Float[Tensor, "rows columns"],
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    is_square: bool,
) -> tuple[Cast | None, Cast | None]:
    """Cast a contiguous matrix with one scale for each block of 128 numbers, or of 128 x 128.

    The blocks are 128 neighbours in a row of the matrix, and in a row of the transposed matrix,
    whose rows are padded to a multiple of 128.

    Shapes: scales ``(rows, columns/128)`` and ``(columns, rows/128)``, stored by columns; of square
        blocks ``(rows/128, columns/128)`` and its transpose, stored by rows. Divisions round up.
    """
    result = _new(matrix, dtype, rows=rows, columns=columns, multiple=TILE)
    tiles = _tiles(matrix, result)
    flipped = tiles[1], tiles[0]
    row_shape = tiles if is_square else (tiles[1], matrix.shape[0])
    column_shape = flipped if is_square else (tiles[0], matrix.shape[1])
    new = matrix.new_empty
    row_scale = new(row_shape if rows else (0, 0), dtype=torch.float32)
    column_scale = new(column_shape if columns else (0, 0), dtype=torch.float32)
    with on_device_of(matrix):
        _cast_by_blocks[tiles](
            matrix,
            result[0],
            result[1],
            row_scale,
            column_scale,
            *matrix.shape,
            _padded(matrix, TILE),
            LARGEST[dtype],
            rows,
            columns,
            IS_SQUARE=is_square,
            TILE=TILE,
            num_warps=8,
        )
    if not is_square:
        row_scale = row_scale.t()
        column_scale = column_scale.t()
    return _casts(result, row_scale, column_scale, rows, columns)


def _padded(matrix: Tensor, multiple: int) -> int:
    return ceil_div(matrix.shape[0], multiple) * multiple


def _new(
    matrix: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, multiple: int
) -> tuple[Tensor, Tensor]:
    shape = tuple(matrix.shape) if rows else (0, 0)
    flipped = (matrix.shape[1], _padded(matrix, multiple)) if columns else (0, 0)
    return matrix.new_empty(shape, dtype=dtype), matrix.new_empty(flipped, dtype=dtype)


def _tiles(matrix: Tensor, result: tuple[Tensor, Tensor]) -> tuple[int, int]:
    # The tiles cover the padding of the transposed matrix.
    rows = max(matrix.shape[0], result[1].shape[1])
    return max(1, ceil_div(rows, TILE)), max(1, ceil_div(matrix.shape[1], TILE))


def _casts(
    result: tuple[Tensor, Tensor],
    row_scale: Tensor,
    column_scale: Tensor,
    rows: bool,
    columns: bool,
) -> tuple[Cast | None, Cast | None]:
    by_rows = (result[0], row_scale) if rows else None
    by_columns = (result[1], column_scale) if columns else None
    return by_rows, by_columns


@triton.jit
def _store_rows(
    target: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
) -> None:
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target + at, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def store_columns(
    target: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    padded: tl.tensor,
    columns: tl.tensor,
) -> None:
    """Store the part of a matrix that this program has in its transpose."""
    inside = (column < columns)[:, None] & (row < padded)[None, :]
    at = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(target + at, tl.trans(values.to(target.dtype.element_ty)), mask=inside)


@triton.jit
def scaled_into(values: tl.tensor, factor: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """Return numbers in the range of a format, infinite ones as NaN."""
    # Equal to the numbers, except that infinity times 0 is NaN.
    values = tl.fma(values, 0.0, values)
    return tl.clamp(values * factor, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _cast_by_one_scale(
    matrix: tl.tensor,
    parts: tl.tensor,
    by_rows: tl.tensor,
    by_columns: tl.tensor,
    scale: tl.tensor,
    running_magnitude: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    count: tl.tensor,
    largest: tl.constexpr,
    has_rows: tl.constexpr,
    has_columns: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    # The tile is loaded first, so that it arrives while the magnitudes are combined.
    values, row, column = load_tile(matrix, rows, columns, TILE)
    part = tl.arange(0, PARTS)
    bits = tl.max(tl.load(parts + part, mask=part < count, other=0), 0)
    magnitude = magnitude_of(bits)
    if running_magnitude is not None:
        tl.atomic_max(running_magnitude, tl.max(tl.max(magnitude_bits(values), 1), 0))
    values = scaled_into(values, largest / magnitude, largest)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, magnitude / largest)
    if has_rows:
        _store_rows(by_rows, values, row, column, rows, columns)
    if has_columns:
        store_columns(by_columns, values, row, column, padded, columns)


@triton.jit
def _cast_by_lines(
    matrix: tl.tensor,
    row_magnitudes: tl.tensor,
    column_magnitudes: tl.tensor,
    by_rows: tl.tensor,
    by_columns: tl.tensor,
    row_scale: tl.tensor,
    column_scale: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    largest: tl.constexpr,
    has_rows: tl.constexpr,
    has_columns: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    values, row, column = load_tile(matrix, rows, columns, TILE)
    if has_rows:
        magnitude = magnitude_of(tl.load(row_magnitudes + row, mask=row < rows, other=0))
        is_first = (row < rows) & (tl.program_id(1) == 0)
        tl.store(row_scale + row, magnitude / largest, mask=is_first)
        scaled = values * (largest / magnitude)[:, None]
        _store_rows(by_rows, scaled, row, column, rows, columns)
    if has_columns:
        magnitude = magnitude_of(
            tl.load(column_magnitudes + column, mask=column < columns, other=0)
        )
        is_first = (column < columns) & (tl.program_id(0) == 0)
        tl.store(column_scale + column, magnitude / largest, mask=is_first)
        scaled = values * (largest / magnitude)[None, :]
        store_columns(by_columns, scaled, row, column, padded, columns)


@triton.jit
def _cast_by_blocks(
    matrix: tl.tensor,
    by_rows: tl.tensor,
    by_columns: tl.tensor,
    row_scale: tl.tensor,
    column_scale: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    largest: tl.constexpr,
    has_rows: tl.constexpr,
    has_columns: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    values, row, column = load_tile(matrix, rows, columns, TILE)
    tile_row = tl.program_id(0)
    tile_column = tl.program_id(1)
    bits = magnitude_bits(values)
    if IS_SQUARE:
        magnitude = magnitude_of(tl.max(tl.max(bits, 1), 0))
        scaled = values * (largest / magnitude)
        if has_rows:
            target = row_scale + tile_row * tl.num_programs(1) + tile_column
            tl.store(target, magnitude / largest)
            _store_rows(by_rows, scaled, row, column, rows, columns)
        if has_columns:
            target = column_scale + tile_column * tl.num_programs(0) + tile_row
            tl.store(target, magnitude / largest)
            store_columns(by_columns, scaled, row, column, padded, columns)
    else:
        if has_rows:
            magnitude = magnitude_of(tl.max(bits, 1))
            target = row_scale + tile_column * rows + row
            tl.store(target, magnitude / largest, mask=row < rows)
            scaled = values * (largest / magnitude)[:, None]
            _store_rows(by_rows, scaled, row, column, rows, columns)
        if has_columns:
            magnitude = magnitude_of(tl.max(bits, 0))
            target = column_scale + tile_row * columns + column
            tl.store(target, magnitude / largest, mask=column < columns)
            scaled = values * (largest / magnitude)[None, :]
            store_columns(by_columns, scaled, row, column, padded, columns)
