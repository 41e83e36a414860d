"""Grouped products of experts in 8 bits by ``torch._scaled_grouped_mm``, and the casts they need.

All operands are e4m3 with float32 scales, because torch's kernel supports no other types. A product
sums along the rows of both operands, so each pass needs a separate cast: token rows for outputs and
input gradients, token columns for weight gradients, weights as they are for outputs, and transposed
weights for input gradients.

The kernel would allow finer scales in two places, but the casts of this package do not provide
them: token columns have one scale for all experts, and so do weight columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.grouped_problem import Problem
from lightning_megatron.layers.fp8 import torch_casts
from lightning_megatron.layers.fused.choose_kernels import fused_kernels
from lightning_megatron.plan.grouped_gemm import Pass

FORMAT = torch.float8_e4m3fn
#: Divisor of the sizes of weights and groups, because the kernel loads 16 bytes at once.
MULTIPLE = 16
#: Values in 8 bits, and their scales.
Cast = tuple[Tensor, Tensor]


def cast_kernels(matrix: Tensor) -> ModuleType:
    """Return this package's Triton cast kernels, or its torch operators if Triton cannot run."""
    return fused_kernels(matrix) or torch_casts


def cast_lines(matrix: Tensor, *, rows: bool, columns: bool) -> tuple[Cast | None, Cast | None]:
    """Cast a contiguous matrix, and its transpose, with one scale for each row of the result.

    Shapes: matrix ``(R, C)``; values ``(R, C)`` and scales ``(R, 1)``, values ``(C, R)`` and scales
        ``(C, 1)``.

    Args:
        matrix: The matrix.
        rows: Whether to cast the matrix.
        columns: Whether to cast the transposed matrix.
    """
    kernels = cast_kernels(matrix)
    magnitudes = kernels.line_magnitudes(matrix, of_rows=rows, of_columns=columns)
    casts: tuple[Cast | None, Cast | None] = kernels.cast_by_lines(
        matrix, *magnitudes, FORMAT, multiple=MULTIPLE
    )
    return casts


def cast_weights(weights: Tensor) -> Cast:
    """Cast weights ``(E, N, K)`` with a scale for each row of each expert, ``(E, N)``."""
    experts, n, k = weights.shape
    values, scale = given(cast_lines(weights.view(experts * n, k), rows=True, columns=False)[0])
    return values.view(experts, n, k), scale.view(experts, n)


def cast_transposed_weights(weights: Tensor) -> Cast:
    """Cast weights ``(E, N, K)`` to ``(E, K, N)``, with K scales that all experts share."""
    experts, n, k = weights.shape
    values, scale = given(cast_lines(weights.view(experts * n, k), rows=False, columns=True)[1])
    # The kernel would accept the view; the copy makes the values of each expert contiguous.
    words = values.view(torch.int64).view(k, experts, n // 8)
    contiguous = words.transpose(0, 1).contiguous().view(FORMAT)
    return contiguous, scale.view(1, k).repeat(experts, 1)


def cast_tokens(
    matrix: Tensor, experts: int, *, rows: bool, columns: bool
) -> tuple[Cast | None, Cast | None]:
    """Cast the tokens of all experts; the scales of columns are repeated for each expert.

    Args:
        matrix: Tokens.
        experts: Number of experts.
        rows: Whether to cast with a scale for each row.
        columns: Whether to cast the transposed matrix, with a scale for each column.
    """
    by_rows, by_columns = cast_lines(matrix, rows=rows, columns=columns)
    if by_columns is not None:
        by_columns = by_columns[0], by_columns[1].view(-1).repeat(experts)
    return by_rows, by_columns


def given(cast: Cast | None) -> Cast:
    """Return a cast that must exist."""
    assert cast is not None, "the cast was not requested"
    return cast


def multiply_rows(rows: Cast, weights: Cast, ends: Tensor, *, fast: bool) -> Tensor:
    """Return each expert's rows times its transposed weights, in bfloat16.

    Shapes: rows ``(R, K)`` and ``(R, 1)``; weights ``(E, N, K)`` and ``(E, N)``; result ``(R, N)``.

    Args:
        rows: Rows of all experts.
        weights: Weights; the product sums along their rows.
        ends: End of each expert's rows, in int32.
        fast: Whether tensor cores accumulate with reduced precision.
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
        ends: End of each expert's tokens, in int32; each expert has a positive multiple of 16.
        fast: Whether tensor cores accumulate with reduced precision.
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
    """Passes of a problem in 8 bits, with cached casts.

    Args:
        problem: Operands in bfloat16.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def weights(self) -> Cast:
        """Cast weights for outputs."""
        return cast_weights(self.problem.weights)

    @cached_property
    def transposed_weights(self) -> Cast:
        """Cast transposed weights for input gradients."""
        return cast_transposed_weights(self.problem.weights)

    @cached_property
    def rows(self) -> tuple[Cast | None, Cast | None]:
        """Casts of the inputs by rows and by columns."""
        return self._cast(self.problem.rows, rows=True, columns=True)

    @cached_property
    def grad(self) -> tuple[Cast | None, Cast | None]:
        """Casts of the output gradients by rows and by columns."""
        return self._cast(self.problem.grad, rows=True, columns=True)

    def drop_tokens(self) -> None:
        """Drop the cached casts of tokens, so that the next products cast them again."""
        self.__dict__.pop("rows", None)
        self.__dict__.pop("grad", None)

    def drop_weights(self) -> None:
        """Drop the cached casts of weights."""
        self.__dict__.pop("weights", None)
        self.__dict__.pop("transposed_weights", None)

    def product(self, which: Pass, *, fast: bool = True) -> Tensor:
        """Compute a pass from cached casts.

        Args:
            which: The pass.
            fast: Whether tensor cores accumulate with reduced precision.
        """
        ends = self.problem.ends
        if which is Pass.FORWARD:
            return multiply_rows(given(self.rows[0]), self.weights, ends, fast=fast)
        if which is Pass.DATA_GRAD:
            return multiply_rows(given(self.grad[0]), self.transposed_weights, ends, fast=fast)
        result = multiply_columns(given(self.grad[1]), given(self.rows[1]), ends, fast=fast)
        return self._sum(which, result)

    def product_with_casts(self, which: Pass) -> Tensor:
        """Cast the tokens that a pass needs, and compute it with cached weights and fast sums."""
        ends = self.problem.ends
        if which is Pass.FORWARD:
            rows = given(self._cast(self.problem.rows, rows=True, columns=False)[0])
            return multiply_rows(rows, self.weights, ends, fast=True)
        if which is Pass.DATA_GRAD:
            grad = given(self._cast(self.problem.grad, rows=True, columns=False)[0])
            return multiply_rows(grad, self.transposed_weights, ends, fast=True)
        grad, inputs = (
            given(self._cast(matrix, rows=False, columns=True)[1])
            for matrix in (self.problem.grad, self.problem.rows)
        )
        return self._sum(which, multiply_columns(grad, inputs, ends, fast=True))

    def weight_cast(self, which: Pass) -> Callable[[], Cast] | None:
        """Return a function that casts the weights of a pass; None if it reads no weights."""
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
        """Return the gradient, or for ``WEIGHT_GRAD_ADD`` the float32 sum after its addition."""
        return self.problem.sums.add_(gradient) if which is Pass.WEIGHT_GRAD_ADD else gradient
