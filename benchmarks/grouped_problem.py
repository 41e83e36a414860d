"""Operands of grouped products of experts, and the error of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lightning_megatron.plan.grouped_gemm import Pass

PASSES = {
    Pass.FORWARD: "forward",
    Pass.DATA_GRAD: "input grad",
    Pass.WEIGHT_GRAD_BF16: "weight grad",
    Pass.WEIGHT_GRAD_ADD: "weight grad +=",
}


@dataclass(frozen=True)
class Problem:
    """Operands of all passes of one shape.

    Args:
        rows: Input ``(R, K)``.
        grad: Gradient of the output ``(R, N)``.
        weights: Weights ``(E, N, K)``.
        sums: Float32 gradients of the weights ``(E, N, K)``.
        sizes: Number of rows in each group.
    """

    rows: Tensor
    grad: Tensor
    weights: Tensor
    sums: Tensor
    sizes: Sequence[int]
    ends: Tensor = field(init=False)

    def __post_init__(self) -> None:
        ends = torch.tensor(self.sizes).cumsum(0).int().to(self.rows.device)
        object.__setattr__(self, "ends", ends)

    @property
    def groups(self) -> list[slice]:
        """Rows of each group."""
        bounds = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    @property
    def flops(self) -> int:
        """FLOPs of one pass."""
        return 2 * self.rows.shape[0] * self.weights.shape[1] * self.weights.shape[2]


def draw(num_groups: int, k: int, n: int, sizes: Sequence[int], device: str = "cuda") -> Problem:
    """Return random operands of a shape."""
    num_rows = sum(sizes)
    rows, grad, weights = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((num_rows, k), (num_rows, n), (num_groups, n, k))
    )
    return Problem(
        rows, grad, weights.mul_(0.02), torch.zeros(num_groups, n, k, device=device), sizes
    )


def group_sizes(
    num_rows: int, num_groups: int, skewed: bool, generator: torch.Generator
) -> list[int]:
    """Return equal group sizes, or skewed ones like those of an unbalanced router.

    Skewed sizes are proportional to the squares of uniform random numbers.
    """
    if not skewed:
        return [num_rows // num_groups] * num_groups
    shares = torch.rand(num_groups, generator=generator).square() + 0.02
    sizes = (shares / shares.sum() * num_rows).long().tolist()
    sizes[0] += num_rows - sum(sizes)
    return sizes


def relative_error(problem: Problem, which: Pass, call: Callable[[], Tensor]) -> float:
    """Return the distance from the float64 result, relative to its norm."""
    problem.sums.fill_(1.0)
    result = call()
    distance = size = 0.0
    for number, group in enumerate(problem.groups):
        rows, grad, weight = (
            tensor.double()
            for tensor in (problem.rows[group], problem.grad[group], problem.weights[number])
        )
        if which is Pass.FORWARD:
            expected = rows @ weight.t()
            actual = result[group]
        elif which is Pass.DATA_GRAD:
            expected = grad @ weight
            actual = result[group]
        else:
            expected = grad.t() @ rows + (1.0 if which is Pass.WEIGHT_GRAD_ADD else 0.0)
            actual = result[number]
        distance += float((actual.double() - expected).square().sum())
        size += float(expected.square().sum())
    return (distance / size) ** 0.5
