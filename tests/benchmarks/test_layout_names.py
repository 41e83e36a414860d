"""The name of a layout gives its sizes."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from benchmarks.layout_names import Layout, layout_of


@pytest.mark.parametrize(
    ("name", "layout", "devices"),
    [
        ("single", Layout("single"), 1),
        ("tp3", Layout("tp3", tp=3), 3),
        ("tp2_pp2", Layout("tp2_pp2", tp=2, pp=2), 4),
        ("tp2_dp4", Layout("tp2_dp4", tp=2, dp=4), 8),
    ],
)
def test_a_layout_has_the_sizes_of_its_name(name: str, layout: Layout, devices: int) -> None:
    assert layout_of(name) == layout
    assert layout.devices == devices


@pytest.mark.parametrize("name", ["", "tp", "tp0", "tp2pp2", "tp2_tp2", "ep2", "two"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(
        ArgumentTypeError, match="a layout must be single, or tp, pp and dp with sizes"
    ):
        layout_of(name)
