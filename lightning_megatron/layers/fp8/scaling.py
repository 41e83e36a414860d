"""Choice of scales: from a matrix to the operands of its products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.operand import Operand
from lightning_megatron.layers.fp8.torch_casts import Cast
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.shapes import Float, Int

Axes = Sequence[MeshAxis]


@dataclass(frozen=True)
class Operands:
    """Operands of a matrix; those that were not asked for are None.

    Args:
        rows: Operand with the rows of the matrix, whose elements a product sums up.
        columns: Operand with its columns, whose length is padded with zeros.
        magnitude: Bit patterns from which another cast of the same matrix can start; None if the
            recipe has no use for them.
    """

    rows: Operand | None
    columns: Operand | None
    magnitude: Tensor | None = None

    @classmethod
    def of(
        cls, casts: tuple[Cast | None, Cast | None], magnitude: Int[Tensor, "parts"] | None = None
    ) -> Operands:
        """Return the operands of a matrix and of its transpose.

        Args:
            casts: Numbers and scales of both; None for what was not asked for.
            magnitude: Bit patterns of magnitudes.
        """
        rows, columns = (None if cast is None else Operand(*cast) for cast in casts)
        return cls(rows, columns, magnitude)


@dataclass(frozen=True)
class Scaling:
    """How linear layers cast their inputs, weights and gradients to 8 bits.

    Ranks that share a tensor agree on its scales, so that the layout does not change them: with one
    scale, or with one for each row or column, the largest magnitude is that over all ranks that
    hold a part of the numbers. Blocks of 128 lie within the part of a rank.

    Args:
        settings: The user's settings.
        emulate: Whether products are computed in the precision of the device.
    """

    settings: FP8
    emulate: bool

    @property
    def has_one_scale(self) -> bool:
        """Return whether a tensor has one scale; its transpose then has the same numbers."""
        return self.settings.recipe == "tensorwise"

    def cast_input(
        self,
        matrix: Float[Tensor, "rows columns"],
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
    ) -> Operands:
        """Cast the inputs of a layer.

        Args:
            matrix: The inputs.
            rows: Whether the operand of the rows is needed.
            columns: Whether the operand of the columns is needed.
            row_axes: Axes whose ranks hold other rows.
            column_axes: Axes whose ranks hold other columns.

        Communication: an all-reduce of magnitudes over each axis, except by blocks.
        """
        return self._cast(matrix, "e4m3", rows, columns, row_axes, column_axes)

    def cast_gradient(
        self,
        matrix: Float[Tensor, "rows columns"],
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
    ) -> Operands:
        """Cast the gradient of a layer's outputs, as :meth:`cast_input` casts the inputs."""
        form = self.settings.gradient_format
        return self._cast(matrix, form, rows, columns, row_axes, column_axes)

    def cast_weight(
        self,
        matrix: Float[Tensor, "rows columns"],
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
        magnitude: Int[Tensor, "parts"] | None = None,
    ) -> Operands:
        """Cast the weight of a layer, as :meth:`cast_input` casts the inputs.

        Args:
            matrix: The weight.
            rows: As for :meth:`cast_input`.
            columns: As for :meth:`cast_input`.
            row_axes: As for :meth:`cast_input`.
            column_axes: As for :meth:`cast_input`.
            magnitude: Magnitudes of an earlier cast of the same weight; None finds them.
        """
        return self._cast(
            matrix, "e4m3", rows, columns, row_axes, column_axes, magnitude, is_weight=True
        )

    def _cast(
        self,
        matrix: Tensor,
        form: str,
        rows: bool,
        columns: bool,
        row_axes: Axes,
        column_axes: Axes,
        magnitude: Tensor | None = None,
        is_weight: bool = False,
    ) -> Operands:
        matrix = matrix.contiguous()
        dtype = torch.float8_e5m2 if form == "e5m2" else torch.float8_e4m3fn
        casts = fused_kernels(matrix) or torch_casts
        asked = {"rows": rows, "columns": columns}
        multiple = self.settings.multiple
        if self.settings.recipe == "tensorwise":
            if magnitude is None:
                magnitude = casts.magnitude_parts(matrix)
                _maximize(magnitude, (*row_axes, *column_axes))
            found = casts.cast_by_one_scale(matrix, magnitude, dtype, multiple=multiple, **asked)
            return Operands.of(found, magnitude)
        if self.settings.recipe == "rowwise":
            of_rows, of_columns = casts.line_magnitudes(matrix, of_rows=rows, of_columns=columns)
            _maximize(of_rows, column_axes)
            _maximize(of_columns, row_axes)
            found = casts.cast_by_lines(matrix, of_rows, of_columns, dtype, multiple=multiple)
            return Operands.of(found)
        return Operands.of(casts.cast_by_blocks(matrix, dtype, is_square=is_weight, **asked))


def transposed(operand: Operand, multiple: int) -> Operand:
    """Return the operand of the columns of a matrix with one scale, from that of its rows.

    Args:
        operand: Operand of the rows.
        multiple: Number that the length of the columns is padded to a multiple of.
    """
    return Operand(torch_casts.padded_transpose(operand.values, multiple), operand.scale)


def _maximize(magnitudes: Tensor | None, axes: Axes) -> None:
    if magnitudes is not None:
        for axis in axes:
            all_reduce_(magnitudes, axis, "max")
