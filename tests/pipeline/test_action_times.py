"""Measured times belong to the chunks and kinds of actions, and transfers are timed between the
stages between which microbatches pass; several ranks: see tests/worlds/test_pipelines.py.
"""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.pipeline import action_times
from lightning_megatron.pipeline.action_times import ActionTimes, neighbours
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.placement import Placement

MILLISECONDS: dict[Kind, int] = {"F": 4, "I": 3, "W": 2}


class Clock:
    """Clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, times: ActionTimes, chunk: int, slower: int = 0) -> None:
        """Run three microbatches of every kind, of which the first is slow."""
        for kind, duration in MILLISECONDS.items():
            for microbatch in range(3):
                with times.measure(Action(kind, chunk, microbatch)):
                    self.now += (duration + slower) / 1000 + (microbatch == 0)
                self.now += 1.0


def test_medians_are_computed_for_each_chunk_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(), ActionTimes(torch.device("cpu"))
    monkeypatch.setattr(action_times, "time", clock)
    clock.work(times, 0)
    clock.work(times, 1, slower=10)
    for chunk, medians in enumerate(times.medians(2)):
        for kind, duration in MILLISECONDS.items():
            assert medians.seconds[kind] == pytest.approx((duration + 10 * chunk) / 1000)
        assert (medians.kept, medians.waiting) == (0, 0.0), "a CPU does not tell what is allocated"
    assert times.message_bytes == 0
    for num_bytes in (8, 1000, 16):
        times.record_message(num_bytes)
    assert times.message_bytes == 16, "the median"


def test_neighbours_are_the_stages_between_which_microbatches_pass() -> None:
    assert neighbours(Placement("loop", 1, 1)) == []
    assert neighbours(Placement("loop", 2, 2)) == [(0, 1)]
    assert neighbours(Placement("loop", 4, 1)) == [(0, 1), (2, 3), (1, 2)]
    assert neighbours(Placement("loop", 3, 2)) == [(0, 1), (0, 2), (1, 2)]
    assert neighbours(Placement("v", 4, 2)) == [(0, 1), (2, 3), (1, 2)]
