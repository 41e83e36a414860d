"""Casts to 8 bits of slices of weights, and transposes of weights in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from lightning_megatron.kernels.triton.eight_bits import LARGEST, scaled_into, store_columns
from lightning_megatron.kernels.triton.launch import ceil_div, on_device_of
from lightning_megatron.kernels.triton.magnitudes import TILE, magnitude_bits, magnitude_of
from lightning_megatron.shapes import Float, Int, Shaped

# Elements of a program.
_BLOCK = 8192
# Columns of a row of the table: starts in the numbers and in the target, size, and number of the
# weight.
_ROW = tl.constexpr(4)


class SliceCastKernel:
    """Casts of slices of weights, each of which has the scale of its whole weight.

    Equal to ``layers.fp8.torch_casts.SliceCasts``. All slices are in one launch.

    Shapes: main and target one-dimensional; magnitudes ``(weights,)``.

    Args:
        target: Bit patterns of 8 bits that :meth:`cast` writes.
        slices: Start in ``main``, start in ``target``, size and number of the weight of each slice
            (elements).
    """

    def __init__(
        self,
        main: Float[Tensor, "_"],
        target: Shaped[Tensor, "_"],
        slices: Sequence[tuple[int, int, int, int]],
    ) -> None:
        self._main = main
        self._target = target
        blocks = [
            (start + first, place + first, min(_BLOCK, size - first), weight)
            for start, place, size, weight in slices
            for first in range(0, size, _BLOCK)
        ]
        self._table = torch.tensor(blocks, dtype=torch.int64, device=main.device)
        #: Whether 16 neighbours always lie together, so that a thread reads and writes several.
        self._is_aligned = all(number % 16 == 0 for slice in slices for number in slice[:3])

    def find(self, magnitudes: Int[Tensor, "weights"]) -> None:
        """Set the bit pattern of each weight's largest magnitude in the slices; 0 without any."""
        magnitudes.zero_()
        if len(self._table):
            with on_device_of(self._main):
                _find[(len(self._table),)](
                    self._main,
                    self._table,
                    magnitudes,
                    IS_ALIGNED=self._is_aligned,
                    BLOCK=_BLOCK,
                    num_warps=8,
                )

    def cast(self, magnitudes: Int[Tensor, "weights"], dtype: torch.dtype) -> None:
        """Cast all slices with the scales of these magnitudes of the whole weights."""
        if len(self._table):
            with on_device_of(self._main):
                _cast[(len(self._table),)](
                    self._main,
                    self._target.view(dtype),
                    self._table,
                    magnitudes,
                    LARGEST[dtype],
                    IS_ALIGNED=self._is_aligned,
                    BLOCK=_BLOCK,
                    num_warps=8,
                )


def padded_transpose(
    matrix: Shaped[Tensor, "rows columns"], multiple: int
) -> Shaped[Tensor, "columns padded"]:
    """Return the transpose of a matrix of bytes, with rows padded by 0 to a multiple (elements)."""
    matrix = matrix.contiguous()
    rows, columns = matrix.shape
    padded = ceil_div(rows, multiple) * multiple
    result = matrix.new_empty((columns, padded))
    tiles = ceil_div(padded, TILE), ceil_div(columns, TILE)
    if result.numel():
        with on_device_of(matrix):
            _transpose[tiles](matrix, result, rows, columns, padded, TILE=TILE, num_warps=8)
    return result


@triton.jit
def _entry(table: tl.tensor, column: tl.constexpr, IS_ALIGNED: tl.constexpr) -> tl.tensor:
    """Return an entry of this program's row of the table."""
    entry = tl.load(table + tl.program_id(0) * _ROW + column)
    return tl.multiple_of(entry, 16) if IS_ALIGNED else entry


@triton.jit
def _find(
    main: tl.tensor,
    table: tl.tensor,
    magnitudes: tl.tensor,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.arange(0, BLOCK)
    inside = at < _entry(table, 2, IS_ALIGNED)
    numbers = tl.load(main + _entry(table, 0, IS_ALIGNED) + at, mask=inside, other=0.0)
    # A maximum does not depend on the order of the programs.
    weight = _entry(table, 3, False)
    tl.atomic_max(magnitudes + weight, tl.max(magnitude_bits(numbers), 0))


@triton.jit
def _cast(
    main: tl.tensor,
    target: tl.tensor,
    table: tl.tensor,
    magnitudes: tl.tensor,
    largest: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.arange(0, BLOCK)
    inside = at < _entry(table, 2, IS_ALIGNED)
    start = main + _entry(table, 0, IS_ALIGNED)
    numbers = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    magnitude = magnitude_of(tl.load(magnitudes + _entry(table, 3, False)))
    values = scaled_into(numbers, largest / magnitude, largest)
    place = target + _entry(table, 1, IS_ALIGNED) + at
    tl.store(place, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _transpose(
    matrix: tl.tensor,
    result: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    values = tl.load(matrix + at, mask=inside, other=0)
    store_columns(result, values, row, column, padded, columns)
