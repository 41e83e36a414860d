"""Helpers for tests of grouped rows on a GPU: inputs, comparisons and captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_megatron.experts.compute.grouped_mlp import GroupedMLP
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.grouped_gemm import workspace_bytes

Results = TypeVar("Results")

#: Sizes of six groups of at most 700 rows: uneven, some empty, all empty, one full, few rows.
SIZES = (
    [100, 0, 333, 1, 127, 139],
    [0, 128, 256, 64, 200, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 700, 0, 0, 0],
    [1, 2, 3, 4, 5, 6],
)
#: Sizes of groups, n and k of launches: no tile divides them, empty groups at all positions, many
#: groups, one group, only empty groups.
LAUNCHES = {
    "uneven": ([1, 700, 0, 3, 129, 64, 65, 0], 528, 320),
    "tiny": ([i % 7 for i in range(70)], 144, 264),
    "holes": ([0, 128, 0, 256, 0], 256, 256),
    "one": ([777], 512, 1024),
    "single": ([900 if i == 33 else 0 for i in range(40)], 384, 192),
    "many": ([(i * 37) % 40 for i in range(256)], 192, 128),
    "large": ([3000, 10, 1500, 257], 1536, 384),
    "empty": ([0, 0, 0, 0], 256, 128),
}
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


def multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def workspace_of(num_groups: int, num_sms: int) -> Tensor:
    """Allocate the workspace of a launch."""
    return torch.empty(workspace_bytes(num_groups, num_sms), dtype=torch.uint8, device="cuda")


def poisoned(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows with NaN in rows of no group, so that a read of them spoils sums."""
    rows = rows.clone()
    rows[sum(sizes) :] = torch.nan
    return rows


def experts_of(width: int, config: ExpertsConfig) -> nn.Module:
    """Return initialized experts in bfloat16."""
    module = GroupedMLP(width, config, ParallelMesh.single()).bfloat16()
    wrapped = nn.ModuleDict({"experts": module}).to_empty(device="cuda")
    initialize_(wrapped, "cuda", 0)
    return wrapped["experts"]


def assert_close(actual: Tensor, expected: Tensor, limit: float, what: str) -> None:
    """Assert that the norm of the difference is below a limit, relative to that of ``expected``."""
    error = float(
        (actual.detach().double() - expected.detach()).norm()
        / expected.detach().norm().clamp_min(1e-30)
    )
    assert error < limit, f"{what}: relative error {error:.1e}"


def captured(step: Callable[[], Results], **options: Any) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Run a step once on a separate stream, as graphs require, and capture it; return the graph
    and the results that replays fill.
    """
    side = options.get("stream") or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        results = step()
    return graph, results
