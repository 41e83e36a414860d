"""The benchmark of grouped products times right products, and its means are means of its rows."""

from __future__ import annotations

import pytest
import torch

from benchmarks.grouped_gemm import LOOP, OURS, TORCH, Row, calls, table
from benchmarks.grouped_problem import PASSES, draw, group_sizes, relative_error
from lightning_megatron.plan.grouped_gemm import Pass


@pytest.mark.parametrize("which", PASSES)
def test_every_variant_computes_the_product_that_it_times(which: Pass) -> None:
    torch.manual_seed(0)
    problem = draw(4, 32, 48, [5, 20, 0, 7], "cpu")
    for name, call in calls(problem, which, ours="loop").items():
        assert relative_error(problem, which, call) < 1e-2, name


def test_skewed_groups_have_all_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    assert group_sizes(100, 4, False, generator) == [25] * 4
    sizes = group_sizes(1000, 8, True, generator)
    assert sum(sizes) == 1000
    assert max(sizes) > 2 * min(sizes)


def test_means_are_geometric() -> None:
    def row(which: Pass, skewed: bool, ours: float) -> Row:
        return Row(
            "Mixtral-8x7B down",
            skewed,
            which,
            {OURS: ours, TORCH: 100.0, LOOP: 50.0},
            "tile",
            (1e-3, 2e-3),
            0.01,
        )

    text = table(
        [
            row(Pass.FORWARD, False, 200.0),
            row(Pass.FORWARD, True, 50.0),
            row(Pass.DATA_GRAD, True, 100.0),
        ]
    )
    assert "| forward | 2.00 | 0.50 | 1.00 |" in text
    assert "| input grad |  | 1.00 | 1.00 |" in text
    assert "at most 1.0%" in text
