"""Weights of linear layers that an optimizer keeps in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.layers.fp8.operand import Operand, transposed
from lightning_megatron.layers.parameter_stack import neighbours_as_one
from lightning_megatron.shapes import Float, Int, Shaped

#: Format of weights.
FORMAT = torch.float8_e4m3fn


@dataclass(frozen=True)
class StoredWeight:
    """Weight in 8 bits with one scale, which the optimizer's buffer updates in place.

    Equal to the concatenation of all parts along the rows, times the scale.

    All tensors keep their addresses, so that CUDA graphs can read them.

    Shapes: parts ``(rows_i, columns)``; scale and magnitude ``(1,)``.

    Args:
        parts: Bit patterns of the 8-bit values, from the first row to the last.
        scale: Scale in float32.
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
        """Return the operand of the columns, a copy.

        Args:
            multiple: The length of the columns is padded to a multiple of this (elements).
        """
        return transposed(self.rows, multiple)
