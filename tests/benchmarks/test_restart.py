"""The parts of a restart add up to the time from the kill to the first step."""

from __future__ import annotations

import pytest

from benchmarks.restart import MOMENTS, parts


def test_parts_are_times_of_the_last_rank_and_add_up() -> None:
    names = list(MOMENTS)
    before = [("begun", 1.0, 7), ("stepped", 9.0, 7)]
    first = (
        before
        + [("error", 10.5, 7)]
        + [(name, 11.0 + number, 8) for number, name in enumerate(names[1:])]
    )
    # The killed rank records no error.
    second = (
        before
        + [(name, 11.5 + number, 9) for number, name in enumerate(names[1:])]
        + [("stepped", 30.0, 9)]
    )
    times = parts([first, second], killed=10.0)
    assert list(times) == list(MOMENTS.values())
    assert times["the other rank notices"] == 0.5
    assert times["imports"] == 1.0
    assert sum(times.values()) == pytest.approx(17.5 - 10.0)
