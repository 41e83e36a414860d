"""Casts of the factors of linear layers to 8 bits, with the scales of the chosen recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.delayed import LayerScales, Use
from lightning_megatron.layers.fp8.operand import Operand, Operands, transposed
from lightning_megatron.layers.fp8.weight_casts import LayerCasts
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.layers.fused.one_shot import one_shot_all_reduce_
from lightning_megatron.layers.parameters.gradient_slot import neighbours_as_one
from lightning_megatron.plan.fp8 import FP8
from lightning_megatron.shapes import Float, Int, Shaped

Axes = Sequence[MeshAxis]


@dataclass(frozen=True)
class Scaling:
    """Settings and state of a linear layer's casts of inputs, weights and gradients to 8 bits.

    Ranks that share a tensor agree on its scales, so that scales do not depend on the layout: with
    one scale per tensor, row or column, the largest magnitude is taken over all ranks that hold a
    part of the elements. Blocks of 128 lie within the part of one rank. Scales from earlier steps
    are the same on all ranks of a stage.

    Args:
        emulate: As for :func:`~lightning_megatron.layers.fp8.operand.product`.
        scales: Scales of this layer from earlier steps; None if scales follow from each tensor.
        counts: Whether casts update the magnitudes of the current step.
        casts: Casts of the weight that microbatches share; None casts for each product.
        stored: The weight, if it is kept in 8 bits, with a scale of its own magnitude in every
            recipe; None casts it.
    """

    settings: FP8
    emulate: bool
    scales: LayerScales | None = None
    counts: bool = True
    casts: LayerCasts | None = None
    stored: StoredWeight | None = None

    @property
    def has_one_scale(self) -> bool:
        """Return whether a tensor has one scale; its transpose then has the same 8-bit values."""
        return self.settings.has_one_scale

    @property
    def sums_fast(self) -> bool:
        """Return whether forward products may accumulate with fewer bits, which is faster."""
        return self.settings.recipe != "blockwise"

    @property
    def reads_magnitudes(self) -> bool:
        """Return whether casts need the largest magnitude of a tensor and can take a known one.

        Compiled code computes it in the cast. Tensors of inference mode have no version counter,
        so a known magnitude could be outdated.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return False
        earlier = None if self.scales is None else self.scales.magnitude("input")
        return self.has_one_scale and earlier is None

    def counting(self, counts: bool) -> Scaling:
        """Return a copy with another value of ``counts``."""
        return self if self.counts == counts else replace(self, counts=counts)

    def reading(self, stored: StoredWeight | None) -> Scaling:
        """Return a copy that reads the weight where the optimizer keeps it; None casts it again.

        From now on the history of :attr:`scales` gets the weight's magnitude from the same place.
        """
        if self.scales is not None:
            self.scales.follow_weight(None if stored is None else stored.magnitude)
        return replace(self, stored=stored)

    def cast_input(
        self,
        matrix: Float[Tensor, "rows columns"],
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
        bits: Int[Tensor, "parts"] | None = None,
    ) -> Operands:
        """Cast the inputs of a layer to the requested operands.

        Args:
            row_axes: Axes whose ranks hold other rows.
            column_axes: Axes whose ranks hold other columns.
            bits: Bit patterns whose maximum is the largest magnitude of this rank's inputs; None
                computes it. Only casts with one scale use it.

        Communication: an all-reduce of magnitudes over each axis, except with scales of blocks or
            from earlier steps.
        """
        return self._cast(matrix, "input", "e4m3", rows, columns, row_axes, column_axes, bits=bits)

    def cast_gradient(
        self,
        matrix: Float[Tensor, "rows columns"],
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
        bits: Int[Tensor, "parts"] | None = None,
    ) -> Operands:
        """Cast the gradient of a layer's outputs, as :meth:`cast_input` casts the inputs."""
        form = self.settings.gradient_format
        return self._cast(matrix, "gradient", form, rows, columns, row_axes, column_axes, bits=bits)

    def cast_weight(
        self,
        matrix: Float[Tensor, "rows columns"] | None,
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
        magnitude: Int[Tensor, "parts"] | None = None,
    ) -> Operands:
        """Cast the weight of a layer, as :meth:`cast_input` casts the inputs.

        Microbatches that share casts cast the weight once for each operand. A weight that is kept
        in 8 bits is read without a cast, or transposed by a copy.

        Args:
            matrix: The weight; it may be None if the weight is kept in 8 bits.
            magnitude: Magnitudes of an earlier cast of the same weight; None computes them.
        """

        def cast(rows: bool, columns: bool, magnitude: Tensor | None) -> Operands:
            assert matrix is not None, "a weight that is cast was kept"
            return self._cast(
                matrix, "weight", "e4m3", rows, columns, row_axes, column_axes, magnitude
            )

        if self.stored is not None:
            return self._stored_operands(self.stored, rows, columns)
        if self.casts is None:
            return cast(rows, columns, magnitude)
        counts = self.counts and self.scales is not None
        return self.casts.operands(
            cast, rows=rows, columns=columns, counts=counts, magnitude=magnitude
        )

    def _stored_operands(self, stored: StoredWeight, rows: bool, columns: bool) -> Operands:
        """Return the operands of a weight that is kept in 8 bits; microbatches share the copy."""

        def copy(rows: bool, columns: bool, magnitude: Tensor | None) -> Operands:
            return Operands(None, stored.columns(self.settings.multiple) if columns else None)

        operands = (
            copy(False, columns, None)
            if self.casts is None
            else self.casts.operands(
                copy, rows=False, columns=columns, counts=False, magnitude=None
            )
        )
        return replace(operands, rows=stored.rows if rows else None)

    def _cast(
        self,
        matrix: Tensor,
        use: Use,
        form: str,
        rows: bool,
        columns: bool,
        row_axes: Axes,
        column_axes: Axes,
        magnitude: Tensor | None = None,
        bits: Tensor | None = None,
    ) -> Operands:
        matrix = matrix.contiguous()
        dtype = torch.float8_e5m2 if form == "e5m2" else torch.float8_e4m3fn
        casts = fused_kernels(matrix) or torch_casts
        outputs = {"rows": rows, "columns": columns}
        multiple = self.settings.multiple
        if self.has_one_scale:
            scales = self.scales
            earlier = None if scales is None else scales.magnitude(use)
            if earlier is None and magnitude is None:
                axes = [axis for axis in (*row_axes, *column_axes) if axis.size > 1]
                if bits is None:
                    magnitude = casts.magnitude_parts(matrix)
                else:
                    # The all-reduce must not change ``bits``, which another cast may need.
                    magnitude = bits.clone() if axes else bits
                _maximize(magnitude, axes)
            parts = magnitude if earlier is None else earlier
            step_magnitude = (
                scales.step_magnitude(use) if scales is not None and self.counts else None
            )
            cast_values = casts.cast_by_one_scale(
                matrix, parts, dtype, multiple=multiple, running_magnitude=step_magnitude, **outputs
            )
            return Operands.of(cast_values, magnitude)
        if self.settings.recipe == "rowwise":
            of_rows, of_columns = casts.line_magnitudes(matrix, of_rows=rows, of_columns=columns)
            _maximize(of_rows, column_axes)
            _maximize(of_columns, row_axes)
            cast_values = casts.cast_by_lines(matrix, of_rows, of_columns, dtype, multiple=multiple)
            return Operands.of(cast_values)
        return Operands.of(
            casts.cast_by_blocks(matrix, dtype, is_square=use == "weight", **outputs)
        )


def _maximize(magnitudes: Tensor | None, axes: Axes) -> None:
    if magnitudes is not None:
        for axis in axes:
            one_shot_all_reduce_(magnitudes, axis, "max")


#: Format of weights.
FORMAT = torch.float8_e4m3fn


@dataclass(frozen=True)
class StoredWeight:
    """Weight in 8 bits with one scale, which the optimizer's buffer updates in place.

    Equal to the concatenation of all parts along the rows, times the scale. All tensors keep their
    addresses, so that CUDA graphs can read them.

    Shapes: parts ``(rows_i, columns)``; scale and magnitude ``(1,)``.

    Args:
        parts: Bit patterns of the 8-bit values.
        magnitude: Bit pattern of the largest magnitude (float32), from which the scale follows.
    """

    parts: tuple[Shaped[Tensor, "_ columns"], ...]
    scale: Float[Tensor, "1"]
    magnitude: Int[Tensor, "1"]

    @property
    def rows(self) -> Operand:
        """Return the operand of the rows, without a copy if the parts are adjacent in memory."""
        whole = neighbours_as_one(self.parts)
        return Operand((torch.cat(self.parts) if whole is None else whole).view(FORMAT), self.scale)

    def columns(self, multiple: int) -> Operand:
        """Return a copy as the operand of the columns, whose length is padded to a multiple."""
        return transposed(self.rows, multiple)
