"""Casts of the factors of linear layers to 8 bits, with the scales of the chosen recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
#: Format of inputs and weights.
FORMAT = torch.float8_e4m3fn


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
        """Return a copy with another value of ``counts``.

        Magnitudes in evaluations and trials do not count as magnitudes of a step.
        """
        return self if self.counts == counts else replace(self, counts=counts)

    def reading(self, stored: StoredWeight | None) -> Scaling:
        """Return a copy that reads the weight where the optimizer keeps it; None casts it again.

        From now on the history of :attr:`scales` gets the weight's magnitude from the same place.
        """
        if self.scales is not None:
            self.scales.follow_weight(None if stored is None else stored.magnitude)
        return replace(self, stored=stored)

    def cast(
        self,
        matrix: Float[Tensor, "rows columns"],
        use: Use,
        *,
        rows: bool,
        columns: bool,
        row_axes: Axes = (),
        column_axes: Axes = (),
        magnitude: Int[Tensor, "parts"] | None = None,
        bits: Int[Tensor, "parts"] | None = None,
    ) -> Operands:
        """Cast a factor of the layer's products to the requested operands.

        Args:
            row_axes: Axes whose ranks hold other rows.
            column_axes: Axes whose ranks hold other columns.
            magnitude: Magnitudes of an earlier cast of the same matrix; None computes them.
            bits: Bit patterns whose maximum is the largest magnitude of this rank's part; None
                computes it. Only casts with one scale use it.

        Communication: an all-reduce of magnitudes over each axis, except with scales of blocks or
            from earlier steps.
        """
        matrix = matrix.contiguous()
        is_e5m2 = use == "gradient" and self.settings.gradient_format == "e5m2"
        dtype = torch.float8_e5m2 if is_e5m2 else FORMAT
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
            step_magnitude = None
            if scales is not None and self.counts:
                step_magnitude = scales.step_magnitudes[use]
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

    def cast_weight(
        self,
        matrix: Float[Tensor, "rows columns"] | None,
        *,
        rows: bool,
        columns: bool,
        magnitude: Int[Tensor, "parts"] | None = None,
        **axes: Any,
    ) -> Operands:
        """Cast the weight of a layer; the other arguments are those of :meth:`cast`.

        Microbatches that share casts cast the weight once for each operand. A weight that is kept
        in 8 bits is read without a cast, or transposed by a copy.

        Args:
            matrix: The weight; it may be None if the weight is kept in 8 bits.
        """
        stored = self.stored

        def cast(rows: bool, columns: bool, magnitude: Tensor | None) -> Operands:
            if stored is not None:
                return Operands(None, stored.columns(self.settings.multiple) if columns else None)
            assert matrix is not None, "a weight that is cast was kept"
            return self.cast(
                matrix, "weight", rows=rows, columns=columns, magnitude=magnitude, **axes
            )

        casts_rows = rows and stored is None
        if self.casts is None:
            operands = cast(casts_rows, columns, magnitude)
        else:
            counts = self.counts and self.scales is not None and stored is None
            operands = self.casts.operands(
                cast, rows=casts_rows, columns=columns, counts=counts, magnitude=magnitude
            )
        return replace(operands, rows=stored.rows) if stored is not None and rows else operands


def _maximize(magnitudes: Tensor | None, axes: Axes) -> None:
    if magnitudes is not None:
        for axis in axes:
            one_shot_all_reduce_(magnitudes, axis, "max")


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
