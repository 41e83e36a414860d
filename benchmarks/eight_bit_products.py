"""Grouped products of experts in 8 bits by ``torch._scaled_grouped_mm``, and the casts they need.

All operands are e4m3 with float32 scales, because torch's kernel supports no other types. A product
sums up the rows of both operands, so each pass needs a cast of its own: rows of tokens for outputs
and input gradients, columns of tokens for weight gradients, weights as they are for outputs and
transposed for input gradients.

Two kinds of scales are coarser than the kernel would allow, so that the casts of the package serve:
columns of tokens have one scale for all experts, and so do columns of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.grouped_gemm import Problem
from lightning_megatron.layers.choose_kernels import fused_kernels
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.plan.grouped_gemm import Pass

FORMAT = torch.float8_e4m3fn
#: Sizes of weights and groups must be multiples of this: the kernel loads 16 bytes at once.
MULTIPLE = 16
#: Numbers of 8 bits and their scales.
Cast = tuple[Tensor, Tensor]


def cast_kernels(matrix: Tensor) -> ModuleType:
    """Return the package's Triton kernels, or its operators of torch where these cannot run."""
    return fused_kernels(matrix) or torch_casts


def cast_lines(matrix: Tensor, *, rows: bool, columns: bool) -> tuple[Cast | None, Cast | None]:
    """Cast a contiguous matrix with a scale for each row, and its transpose likewise.

    Shapes: matrix ``(R, C)``; values ``(R, C)`` and scales ``(R, 1)``, values ``(C, R)`` and scales
        ``(C, 1)``.

    Args:
        matrix: The matrix.
        rows: Whether the matrix is needed.
        columns: Whether the transposed matrix is needed.
    """
    kernels = cast_kernels(matrix)
    magnitudes = kernels.line_magnitudes(matrix, of_rows=rows, of_columns=columns)
    found: tuple[Cast | None, Cast | None] = kernels.cast_by_lines(
        matrix, *magnitudes, FORMAT, multiple=MULTIPLE
    )
    return found


def cast_weights(weights: Tensor) -> Cast:
    """Cast weights ``(E, N, K)`` with a scale for each row of each expert, ``(E, N)``."""
    experts, n, k = weights.shape
    values, scale = given(cast_lines(weights.view(experts * n, k), rows=True, columns=False)[0])
    return values.view(experts, n, k), scale.view(experts, n)


def cast_transposed_weights(weights: Tensor) -> Cast:
    """Cast weights ``(E, N, K)`` to ``(E, K, N)``, with the same K scales for all experts."""
    experts, n, k = weights.shape
    values, scale = given(cast_lines(weights.view(experts * n, k), rows=False, columns=True)[1])
    # The kernel would take the view; the copy gives each expert's numbers neighbouring addresses.
    words = values.view(torch.int64).view(k, experts, n // 8)
    apart = words.transpose(0, 1).contiguous().view(FORMAT)
    return apart, scale.view(1, k).repeat(experts, 1)


def cast_tokens(
    matrix: Tensor, experts: int, *, rows: bool, columns: bool
) -> tuple[Cast | None, Cast | None]:
    """Cast the tokens of all experts; the scales of columns are repeated for each expert.

    Args:
        matrix: Tokens.
        experts: Number of experts.
        rows: Whether the rows are needed.
        columns: Whether the columns are needed.
    """
    by_rows, by_columns = cast_lines(matrix, rows=rows, columns=columns)
    if by_columns is not None:
        by_columns = by_columns[0], by_columns[1].view(-1).repeat(experts)
    return by_rows, by_columns


def given(cast: Cast | None) -> Cast:
    """Return a cast that was asked for."""
    assert cast is not None, "the cast was not asked for"
    return cast


def multiply_rows(rows: Cast, weights: Cast, ends: Tensor, *, fast: bool) -> Tensor:
    """Return each expert's rows times its transposed weights, in bfloat16.

    Shapes: rows ``(R, K)`` and ``(R, 1)``; weights ``(E, N, K)`` and ``(E, N)``; result ``(R, N)``.

    Args:
        rows: Rows of all experts.
        weights: Weights, of which the product sums up rows.
        ends: Ends of the experts' rows in int32.
        fast: Whether the chip sums up with fewer bits.
    """
    return torch._scaled_grouped_mm(
        rows[0],
        weights[0].transpose(1, 2),
        rows[1].view(-1),
        weights[1],
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def multiply_columns(grad: Cast, rows: Cast, ends: Tensor, *, fast: bool) -> Tensor:
    """Return each expert's transposed gradients times its rows, in bfloat16.

    Shapes: grad ``(N, R)`` and ``(E * N,)``; rows ``(K, R)`` and ``(E * K,)``; result
        ``(E, N, K)``.

    Args:
        grad: Columns of the gradients of the outputs.
        rows: Columns of the inputs.
        ends: Ends of the experts' tokens in int32, positive multiples of 16 apart.
        fast: Whether the chip sums up with fewer bits.
    """
    return torch._scaled_grouped_mm(
        grad[0],
        rows[0].t(),
        grad[1],
        rows[1],
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class EightBits:
    """The passes of a problem in 8 bits, with casts that are kept until they are dropped.

    Args:
        problem: Operands in bfloat16.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def weights(self) -> Cast:
        """Weights for outputs."""
        return cast_weights(self.problem.weights)

    @cached_property
    def transposed_weights(self) -> Cast:
        """Weights for input gradients."""
        return cast_transposed_weights(self.problem.weights)

    @cached_property
    def rows(self) -> tuple[Cast | None, Cast | None]:
        """Rows and columns of the inputs."""
        return self._cast(self.problem.rows, rows=True, columns=True)

    @cached_property
    def grad(self) -> tuple[Cast | None, Cast | None]:
        """Rows and columns of the gradients of the outputs."""
        return self._cast(self.problem.grad, rows=True, columns=True)

    def drop_tokens(self) -> None:
        """Drop the casts of tokens, so that the next products make them anew."""
        self.__dict__.pop("rows", None)
        self.__dict__.pop("grad", None)

    def drop_weights(self) -> None:
        """Drop the casts of weights."""
        self.__dict__.pop("weights", None)
        self.__dict__.pop("transposed_weights", None)

    def product(self, which: Pass, *, fast: bool = True) -> Tensor:
        """Compute a pass from kept casts.

        Args:
            which: The pass.
            fast: Whether the chip sums up with fewer bits.
        """
        ends = self.problem.ends
        if which is Pass.FORWARD:
            return multiply_rows(given(self.rows[0]), self.weights, ends, fast=fast)
        if which is Pass.DATA_GRAD:
            return multiply_rows(given(self.grad[0]), self.transposed_weights, ends, fast=fast)
        columns = given(self.grad[1]), given(self.rows[1])
        return self._sum(which, multiply_columns(*columns, ends, fast=fast))

    def product_with_casts(self, which: Pass) -> Tensor:
        """Cast the tokens that a pass needs, and compute it with kept weights and fast sums."""
        ends = self.problem.ends
        if which is Pass.FORWARD:
            rows = given(self._cast(self.problem.rows, rows=True, columns=False)[0])
            return multiply_rows(rows, self.weights, ends, fast=True)
        if which is Pass.DATA_GRAD:
            grad = given(self._cast(self.problem.grad, rows=True, columns=False)[0])
            return multiply_rows(grad, self.transposed_weights, ends, fast=True)
        columns = (
            given(self._cast(matrix, rows=False, columns=True)[1])
            for matrix in (self.problem.grad, self.problem.rows)
        )
        return self._sum(which, multiply_columns(*columns, ends, fast=True))

    def weight_cast(self, which: Pass) -> Callable[[], Cast] | None:
        """Return the cast of weights that a pass needs once a step; None if it needs none."""
        if which is Pass.FORWARD:
            return lambda: cast_weights(self.problem.weights)
        if which is Pass.DATA_GRAD:
            return lambda: cast_transposed_weights(self.problem.weights)
        return None

    def _cast(
        self, matrix: Tensor, *, rows: bool, columns: bool
    ) -> tuple[Cast | None, Cast | None]:
        return cast_tokens(matrix, len(self.problem.weights), rows=rows, columns=columns)

    def _sum(self, which: Pass, gradient: Tensor) -> Tensor:
        """Return a weight gradient, or the float32 sum to which it is added."""
        return self.problem.sums.add_(gradient) if which is Pass.WEIGHT_GRAD_ADD else gradient
