"""Measured times of actions belong to the virtual stages that run the actions."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.pipeline import device_clock
from lightning_megatron.pipeline.action_times import ActionTimes, gather_measurements
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.placement import Placement
from tests.world import run_world

MILLISECONDS: dict[Kind, int] = {"F": 4, "I": 3, "W": 2}


class Clock:
    """Clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, times: ActionTimes, kind: Kind, chunk: int, milliseconds: list[int]) -> None:
        for microbatch, duration in enumerate(milliseconds):
            with times.measure(Action(kind, chunk, microbatch)):
                self.now += duration / 1000
            self.now += 1.0


def test_medians_are_computed_for_each_chunk_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(device_clock, "time", clock)
    times = ActionTimes(torch.device("cpu"))
    for chunk in range(2):
        for kind, duration in MILLISECONDS.items():
            # The first microbatch is slow.
            clock.work(times, kind, chunk, [1000, duration + 10 * chunk, duration + 10 * chunk])
    for chunk, medians in enumerate(times.medians(2)):
        for kind, duration in MILLISECONDS.items():
            assert medians.seconds[kind] == pytest.approx((duration + 10 * chunk) / 1000)
        assert (medians.kept, medians.waiting) == (0, 0.0), "a CPU does not tell what is allocated"


def test_message_bytes_is_the_median_size_of_messages() -> None:
    times = ActionTimes(torch.device("cpu"))
    assert times.message_bytes == 0
    for num_bytes in (8, 1000, 16):
        times.record_message(num_bytes)
    assert times.message_bytes == 16


def _measured(rank: int, size: int) -> tuple[tuple[int, ...], ...]:
    mesh = ParallelMesh.create(ParallelLayout(size, pp=2, vpp=2), device="cpu")
    clock = Clock()
    device_clock.time = clock
    times = ActionTimes(mesh.device)
    for chunk in range(2):
        virtual = chunk * 2 + mesh.pp.rank
        for kind, duration in MILLISECONDS.items():
            clock.work(times, kind, chunk, [duration + 10 * virtual])
    placement = Placement("loop", 2, 2)
    measured = gather_measurements(times.medians(2), mesh, placement, 10 + rank, 0.002 * rank)
    assert measured.free == 10, "the fullest rank counts"
    assert measured.costs.transfer == 2000, "the slowest transfer counts"
    assert measured.as_dict()["transfer"] == 2000
    costs = measured.costs
    return costs.forward, costs.input_half, costs.weight_half


def test_all_ranks_get_the_costs_of_all_virtual_stages() -> None:
    costs = run_world(_measured, 2)
    assert costs[0] == costs[1]
    for ticks, duration in zip(costs[0], MILLISECONDS.values(), strict=True):
        assert ticks == tuple(1000 * (duration + 10 * virtual) for virtual in range(4))


def _slower(rank: int, size: int) -> tuple[int, ...]:
    mesh = ParallelMesh.create(ParallelLayout(size), device="cpu")
    clock = Clock()
    device_clock.time = clock
    times = ActionTimes(mesh.device)
    for kind, duration in MILLISECONDS.items():
        clock.work(times, kind, 0, [duration + rank])
    return gather_measurements(times.medians(1), mesh, Placement("loop", 1, 1), None).costs.forward


def test_the_slowest_rank_of_a_stage_counts() -> None:
    assert run_world(_slower, 2) == [(5000,), (5000,)]
