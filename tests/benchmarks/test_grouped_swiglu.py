"""The table of the benchmark of SwiGLU in the launch of the product has ratios and means."""

from __future__ import annotations

from benchmarks.grouped_swiglu import ALONE, BOTH, KEPT, PRODUCT, Row, table


def test_ratios_compare_with_product_and_swiglu_in_turn_and_means_are_geometric() -> None:
    def row(kept: float, alone: float) -> Row:
        return Row(
            "DeepSeek-V3", True, {PRODUCT: 90.0, BOTH: 100.0, KEPT: kept, ALONE: alone}, "tile"
        )

    text = table([row(50.0, 25.0), row(200.0, 100.0)])
    assert (
        "| DeepSeek-V3 (32, 7168, 4096, 16384) | skewed | 90 | 100 | 50 | 25 | 2.00 | 4.00 | tile |"
        in text
    )
    assert "Geometric means: 1.00 kept, 2.00 not stored." in text
