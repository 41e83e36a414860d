"""The comparison of both orders of norms trains on the speeches and draws the recorded losses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import norm_positions
from benchmarks.norm_positions import Losses, arguments, main, mean, smoothed
from lightning_megatron.errors import NonFiniteError
from tests.corpora import SPEECHES, need


def test_smoothed_values_are_means_of_the_last_values() -> None:
    assert smoothed([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]
    assert smoothed([], 2) == []
    assert math.isnan(mean([]))


def test_presets_fill_in_options_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["norm_positions", "--accelerator=gpu", "--layers=3"])
    options = arguments()
    assert (options.layers, options.hidden, options.precision) == (3, 256, "bf16-mixed")
    assert (options.init_std, options.scaled_init) == (0.0625, False)
    monkeypatch.setattr("sys.argv", ["norm_positions", "--accelerator=cpu"])
    assert (arguments().layers, arguments().hidden) == (24, 64)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    pytest.importorskip("matplotlib")
    need(SPEECHES)
    options = {"layers": 1, "hidden": 16, "steps": 3, "warmup": 1, **options, "data-dir": folder}
    options |= {"losses": folder / "losses.json", "picture": folder / "losses.png"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    rates = ["--learning-rate", "1e-3", "2e-3"]
    monkeypatch.setattr("sys.argv", ["norm_positions", "--accelerator=cpu", *flags, *rates])
    main()
    assert (folder / "losses.png").stat().st_size > 1000
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.slow
def test_both_orders_are_trained_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(tmp_path, monkeypatch)
    assert results["settings"]["layers"] == 1
    curves = {
        (curve["order"], curve["learning_rate"]): curve["losses"] for curve in results["curves"]
    }
    assert list(curves) == [("post", 1e-3), ("pre", 1e-3), ("post", 2e-3), ("pre", 2e-3)]
    for losses in curves.values():
        assert len(losses) == 3
        assert all(7.0 < loss < 12.0 for loss in losses)
    # Data and initial weights are the same, and learning rates differ from the second step on.
    assert curves["pre", 1e-3][0] == curves["pre", 2e-3][0]
    assert curves["pre", 1e-3][2] != curves["pre", 2e-3][2]


@pytest.mark.slow
def test_a_diverged_training_ends_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Diverging(Losses):
        def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
            super().on_train_batch_end(trainer, *more)
            if len(self._losses) == 2:
                self._losses[-1] *= math.nan
                raise NonFiniteError("the loss is not finite")

    monkeypatch.setattr(norm_positions, "Losses", Diverging)
    results = run(tmp_path, monkeypatch)
    assert [len(curve["losses"]) for curve in results["curves"]] == [1, 1, 1, 1]
