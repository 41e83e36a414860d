"""Helpers for tests of grouped rows on a GPU: inputs, comparisons and captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Results = TypeVar("Results")

#: Sizes of six groups of at most 700 rows: uneven, some empty, all empty, one full, few rows.
SIZES = (
    [100, 0, 333, 1, 127, 139],
    [0, 128, 256, 64, 200, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 700, 0, 0, 0],
    [1, 2, 3, 4, 5, 6],
)
#: Number of rows behind the last group, which belong to no group and stay unchanged.
TAIL = 37
#: Initial value of result rows that belong to no group; results computed for them would be NaN.
UNTOUCHED = 5.0


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Draw numbers in bfloat16."""
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def ends_of(sizes: Sequence[int]) -> Tensor:
    """Return one past the last row of every group."""
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def poisoned(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows with NaN in rows of no group, so that a read of them spoils sums."""
    rows = rows.clone()
    rows[sum(sizes) :] = torch.nan
    return rows


def assert_close(actual: Tensor, expected: Tensor, limit: float, what: str) -> None:
    """Assert that the norm of the difference is below a limit, relative to that of ``expected``."""
    error = float(
        (actual.detach().double() - expected.detach()).norm()
        / expected.detach().norm().clamp_min(1e-30)
    )
    assert error < limit, f"{what}: relative error {error:.1e}"


def captured(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Run a step once on a separate stream, as graphs require, and capture it; return the graph
    and the results that replays fill.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
