"""Limits on the rows of experts are multiples of a tile, and suggested factors are sufficient."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from lightning_megatron.plan.row_limit import grown_factor, limited_rows, smallest_factor


@pytest.mark.parametrize(
    ("factor", "share", "rows"),
    [(1.0, 128, 128), (1.0, 129, 256), (1.25, 32_768, 40_960), (1.01, 128, 256), (1.0, 0, 0)],
)
def test_limits_are_multiples_of_a_tile(factor: float, share: int, rows: int) -> None:
    assert limited_rows(factor, share) == rows


def test_smallest_factors_suffice_and_grown_factors_add_ten_percent() -> None:
    draw = random.Random(1)
    assert smallest_factor(42_112, 32_768) == 1.29
    for _ in range(2000):
        share = draw.randint(1, 10**6)
        needed = draw.randint(share, 8 * share)
        factor = smallest_factor(needed, share)
        assert limited_rows(factor, share) >= needed
        assert Fraction(round(factor * 100) - 1, 100) * share < needed
        assert grown_factor(needed, share) >= 1.1 * needed / share
        assert grown_factor(needed, share) < 1.1 * needed / share + 0.0101
