"""Median times are measured of variants that run in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.device_time import WARMUP, median_times


def test_variants_run_in_turn_and_warm_up() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    times = iter([100.0] * 2 * WARMUP + [5.0, 1.0, 3.0, 9.0, 4.0, 2.0])

    def timer(call: Callable[[], Any]) -> float:
        call()
        return next(times)

    assert median_times(calls, 3, timer) == {"one": 4.0, "two": 2.0}
    assert order == ["one", "two"] * (WARMUP + 3)
