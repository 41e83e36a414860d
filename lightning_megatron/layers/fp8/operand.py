"""Factors of matrix products in 8 bits, and the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fp8.torch_casts import Cast
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.plan.fp8 import BLOCK
from lightning_megatron.shapes import Float, Int

#: Lowest compute capability with products in 8 bits.
_CAPABILITY = (8, 9)
#: The compute capability with products whose scales belong to blocks.
_BLOCK_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Operand:
    """Factor of a matrix product in 8 bits; the product sums over the elements of its rows.

    Equal to the matrix ``values * scale``, where a scale belongs to all elements, to a row, to 128
    adjacent elements of a row, or to a block of 128 x 128.

    Shapes: values ``(rows, summed)``; scale ``(1,)``, ``(rows, 1)``, ``(rows, summed/128)`` or
        ``(rows/128, summed/128)``, rounded up.
    """

    values: Tensor
    scale: Tensor

    def numbers(self, dtype: torch.dtype) -> Float[Tensor, "rows summed"]:
        """Return the dequantized matrix in another dtype."""
        rows, summed = self.values.shape
        scale = self.scale.to(dtype)
        if scale.dim() == 2 and len(scale) != rows:
            scale = scale.repeat_interleave(BLOCK, 0)[:rows]
        if scale.dim() == 2 and scale.shape[1] > 1:
            scale = scale.repeat_interleave(BLOCK, 1)[:, :summed]
        return self.values.to(dtype) * scale

    def times(self, factor: float) -> Operand:
        """Return the operand multiplied by a number."""
        return self if factor == 1 else Operand(self.values, self.scale * factor)

    def padded(self) -> Operand:
        """Return the operand with its number of rows padded to a multiple of 4 by zeros.

        Only operands whose rows have several scales need this: products on GPUs read the scales of
        four rows at a time.
        """
        missing = -len(self.values) % 4
        if not missing or self.scale.dim() == 1 or self.scale.shape[1] == 1:
            return self
        values = F.pad(self.values.view(torch.uint8), (0, 0, 0, missing))
        return Operand(values.view(self.values.dtype), F.pad(self.scale.t(), (0, missing)).t())

    def split(self, rows: Sequence[int]) -> list[Operand]:
        """Return the operands of consecutive blocks of rows."""
        values = self.values.split(list(rows))
        if self.scale.numel() == 1:
            return [Operand(part, self.scale) for part in values]
        # The product reads scales of rows and blocks in column-major order.
        scales = [part.t().contiguous().t() for part in self.scale.split(list(rows))]
        return [Operand(part, scale) for part, scale in zip(values, scales, strict=True)]


@dataclass(frozen=True)
class Operands:
    """Operands of a matrix; an operand that was not requested is None.

    Args:
        rows: Operand for products that sum over the elements of a row.
        columns: Operand of the columns of the matrix, whose length is padded with zeros.
        magnitude: Bit patterns of magnitudes, which another cast of the same matrix can reuse; None
            if the recipe does not need them.
    """

    rows: Operand | None
    columns: Operand | None
    magnitude: Tensor | None = None

    @classmethod
    def of(
        cls, casts: tuple[Cast | None, Cast | None], magnitude: Int[Tensor, "parts"] | None = None
    ) -> Operands:
        """Return the operands of a matrix and of its transpose, from their values and scales."""
        rows, columns = (None if cast is None else Operand(*cast) for cast in casts)
        return cls(rows, columns, magnitude)


def needed(operand: Operand | None) -> Operand:
    """Return an operand that was requested from a cast, and is therefore not None."""
    assert operand is not None, "the cast was not asked for this operand"
    return operand


def transposed(operand: Operand, multiple: int) -> Operand:
    """Return the operand of the columns of a matrix with one scale, from the operand of its rows.

    The length of the columns is padded to a multiple of ``multiple``.
    """
    bits = operand.values.view(torch.uint8)
    casts = fused_kernels(bits) or torch_casts
    return Operand(casts.padded_transpose(bits, multiple).view(operand.values.dtype), operand.scale)


def has_products(device: torch.device, is_blockwise: bool) -> bool:
    """Return whether a device has matrix products in 8 bits, with scales of blocks or without."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    # Newer GPUs have products with other blocks, whose scales are powers of two.
    if is_blockwise:
        return capability == _BLOCK_CAPABILITY
    return capability >= _CAPABILITY


def product(
    left: Operand,
    right: Operand,
    dtype: torch.dtype,
    *,
    emulate: bool,
    fast: bool = False,
    out: Float[Tensor, "rows columns"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """Return ``left @ right^T``.

    Shapes: left ``(rows, summed)``, right ``(columns, summed)``.

    Args:
        emulate: Whether the dequantized factors are multiplied in float32, or in float64 for a
            float64 result, instead of by a product in 8 bits.
        fast: Whether the GPU may accumulate with fewer bits, which is faster.
        out: Memory of the result, of this dtype; only without ``emulate``.
    """
    if emulate:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (left.numbers(wide) @ right.numbers(wide).t()).to(dtype)
    options = {} if out is None else {"out": out}
    rows = len(left.values)
    left = left.padded()
    result = torch._scaled_mm(
        left.values,
        right.values.t(),
        left.scale,
        right.scale if right.scale.numel() == 1 else right.scale.t(),
        out_dtype=dtype,
        use_fast_accum=fast,
        **options,
    )
    return result if len(result) == rows else result[:rows]


@dataclass(frozen=True)
class ScaledProduct:
    """Weight gradient ``left @ right^T`` of two operands, for gradient slots.

    The operands have a row for each output and for each input.
    """

    left: Operand
    right: Operand
    emulate: bool
    dtype: torch.dtype

    def value(self) -> Float[Tensor, "out_local in_local"]:
        """Return the gradient."""
        return product(self.left, self.right, self.dtype, emulate=self.emulate)

    def add_to(
        self, sums: Float[Tensor, "out_local in_local"], *, is_empty: bool, scale: float
    ) -> bool:
        """Add the gradient to a sum, in the sum's dtype; the product overwrites an empty sum."""
        left = self.left.times(scale)
        if is_empty and not self.emulate:
            product(left, self.right, sums.dtype, emulate=False, out=sums)
        else:
            gradient = product(left, self.right, sums.dtype, emulate=self.emulate)
            sums.copy_(gradient) if is_empty else sums.add_(gradient)
        return True

    def split(self, rows: Sequence[int]) -> list[ScaledProduct]:
        """Return the products of consecutive rows of the weight."""
        parts = self.left.split(rows)
        return [ScaledProduct(part, self.right, self.emulate, self.dtype) for part in parts]
