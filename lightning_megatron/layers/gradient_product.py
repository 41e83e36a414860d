"""Weight gradients that are computed directly into the memory of the gradient sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.half_types import HALF_TYPES
from lightning_megatron.shapes import Float


class GradientProduct(Protocol):
    """Weight gradient of a linear layer that is not computed yet."""

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        ...

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum, without a temporary tensor of the product where possible.

        Args:
            sums: The sum.
            is_empty: Whether the product overwrites the sum.
            scale: Factor of the gradient.

        Returns:
            Whether the gradient was added. If not, the caller must add :meth:`value`.
        """
        ...

    def split(self, rows: Sequence[int]) -> Sequence[GradientProduct]:
        """Return the products of consecutive rows of the weight.

        Args:
            rows: Number of rows of each product (rows).
        """
        ...


@dataclass(frozen=True)
class MatrixProduct:
    """Weight gradient ``left^T @ right``.

    For half types on a GPU, one matrix product accumulates in the float32 memory of the sum,
    without rounding to the half type and without a temporary tensor.

    Shapes: left ``(rows, out_local)``; right ``(rows, in_local)``.

    Args:
        left: Gradient of the outputs.
        right: Inputs.
    """

    left: Tensor
    right: Tensor

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        return self.left.t() @ self.right

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum; return False if these dtypes have no such product."""
        left = self.left
        right = self.right
        factors = {"beta": 0 if is_empty else 1, "alpha": scale}
        is_half = left.dtype in HALF_TYPES and right.dtype == left.dtype
        if sums.dtype == torch.float32 and left.is_cuda and is_half:
            torch.addmm(sums, left.t(), right, out_dtype=torch.float32, out=sums, **factors)
        elif sums.dtype == left.dtype == right.dtype:
            torch.addmm(sums, left.t(), right, out=sums, **factors)
        else:
            return False
        return True

    def split(self, rows: Sequence[int]) -> Sequence[MatrixProduct]:
        """Return the products of consecutive rows of the weight."""
        return [MatrixProduct(part, self.right) for part in self.left.split(list(rows), dim=1)]


@dataclass(frozen=True)
class ScaledGradient:
    """Weight gradient ``gradient * factor``, with a factor that is known only on the device.

    Args:
        gradient: Gradient for the factor 1.
        factor: One number.
    """

    gradient: Float[Tensor, "out_local in_local"]
    factor: Float[Tensor, ""]

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        return self.gradient * self.factor

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum in one pass; return False if their dtypes differ."""
        if sums.dtype != self.gradient.dtype:
            return False
        if is_empty:
            torch.mul(self.gradient, self.factor * scale, out=sums)
        else:
            sums.addcmul_(self.gradient, self.factor, value=scale)
        return True

    def split(self, rows: Sequence[int]) -> Sequence[ScaledGradient]:
        """Return the gradients of consecutive rows of the weight."""
        return [ScaledGradient(part, self.factor) for part in self.gradient.split(list(rows))]
