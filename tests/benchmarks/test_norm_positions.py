"""The comparison of both orders of norms trains on the speeches and draws what it recorded."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.norm_positions import main, smoothed
from tests.corpora import SPEECHES, need


def test_smoothed_values_are_means_of_the_last_ones() -> None:
    assert smoothed([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]


@pytest.mark.slow
def test_both_orders_are_trained_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    need(SPEECHES)
    options = {"layers": 1, "hidden": 16, "steps": 3, "warmup": 1, "data-dir": tmp_path}
    options |= {"losses": tmp_path / "losses.csv", "picture": tmp_path / "losses.png"}
    given = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr("sys.argv", ["norm_positions", *given])
    main()
    with (tmp_path / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert all(7.0 < float(row[order]) < 12.0 for row in rows for order in ("post", "pre"))
    assert (tmp_path / "losses.png").stat().st_size > 1000
