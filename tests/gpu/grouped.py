"""Rows of groups on a GPU, and what must be true of results for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Results = TypeVar("Results")

#: Sizes of six groups of at most 700 rows: uneven, some empty, all, all but one, few rows.
SIZES = (
    [100, 0, 333, 1, 127, 139],
    [0, 128, 256, 64, 200, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 700, 0, 0, 0],
    [1, 2, 3, 4, 5, 6],
)
#: Rows behind the last group: of no group, and left as they are.
TAIL = 37
#: What rows of no group hold in results, a number: what was computed for them would be none.
UNTOUCHED = 5.0


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Draw numbers in bfloat16."""
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def ends_of(sizes: Sequence[int]) -> Tensor:
    """Return one past the last row of every group."""
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def poisoned(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return rows of which those of no group are not numbers: whoever reads one spoils a sum."""
    rows = rows.clone()
    rows[sum(sizes) :] = torch.nan
    return rows


def assert_close(found: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    """Compare whole results: the norm of their difference beside that of what is wanted."""
    error = float(
        (found.detach().double() - wanted.detach()).norm() / wanted.detach().norm().clamp_min(1e-30)
    )
    assert error < limit, f"{what}: relative error {error:.1e}"


def captured(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Run a step once on a stream of its own, as graphs want it, and capture it; return what
    replays fill as well.
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
