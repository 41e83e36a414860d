"""Tests of the times that are read off measurements, with round numbers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.forecast.chip_speeds import (
    ChipSpeeds,
    Link,
    MeasuredRatios,
    with_other_memory,
)
from lightning_megatron.forecast.operator_trace import Operator
from lightning_megatron.forecast.pass_times import LinkedChip
from tests.forecast.speeds import LATENCY, MEMORY, PEAK, content, round_speeds

BF16 = torch.bfloat16


def product(m, n, k, dtype=BF16, name="mm"):
    num_bytes = dtype.itemsize * (m * k + k * n) + 2 * m * n
    return Operator(name, "product", (1, m, n, k), num_bytes, dtype)


def close(value):
    return pytest.approx(value, rel=1e-3)


def test_times_at_measured_sizes_are_the_measured_ones():
    speeds = round_speeds()
    for name in ("mm", "addmm"):
        seconds = speeds.seconds_of(product(4096, 4096, 4096, name=name))
        assert seconds == close(LATENCY + 2 * 4096**3 / PEAK)
    eight = speeds.seconds_of(product(4096, 14336, 4096, torch.float8_e4m3fn))
    assert eight == close(LATENCY + 4096 * 14336 * 4096 / PEAK)
    assert speeds.seconds_of_pass(2**24) == close(LATENCY + 2**24 / MEMORY)
    pairs = 4096**2 // 2
    for name, number in (("cudnn", 2), ("cudnn_backward", 5)):
        attention = Operator(name, "attention", (number, 32, 4096, 4096, 128, pairs))
        assert speeds.seconds_of(attention) == close(attention.flops / PEAK)
    grouped = Operator("data_grad", "grouped", (8, 8192, 4096, 4096), 2**28, BF16)
    assert speeds.seconds_of(grouped) == close(grouped.flops / PEAK)
    assert speeds.optimizer(2**29) == close(30 * 2**29 / MEMORY)


def test_times_between_and_beyond_measured_sizes():
    speeds = round_speeds()
    assert speeds.seconds_of_pass(2**23) == close(LATENCY + 2**23 / MEMORY)
    assert speeds.seconds_of_pass(4 * 2**30) == close(4 * (LATENCY + 2**30 / MEMORY))
    assert speeds.seconds_of_pass(1) == close(LATENCY + 2**16 / MEMORY)
    # A product with few rows is bound by reading its weight.
    thin = product(1, 8192, 8192)
    assert speeds.seconds_of(thin) > thin.num_bytes / MEMORY
    ratios = MeasuredRatios.of([((1, 1), 2.0), ((4, 1), 8.0)])
    assert ratios.at(2, 1) == close(4.0)


def test_collectives_take_the_time_of_their_traffic():
    speeds = round_speeds()
    two, four = Link(2, 2), Link(4, 4)
    size = 2**27
    assert speeds.collective("all_reduce", size, two) == close(1e-5 + size / 300e9)
    # Each of four ranks sends 3/2 of the tensor, where each of two sends all of it, and one message
    # more as the smallest collective takes.
    small = 1e-5 + 2**16 / 300e9
    expected = 1e-5 + 1.5 * size / 300e9 + small
    assert speeds.collective("all_reduce", size, four) == close(expected)
    assert speeds.collective("all_reduce", size, Link(1, 1)) == 0.0


def test_collectives_between_nodes_share_the_adapters_of_a_node():
    size = 2**30
    slow = round_speeds(network=1e9)
    # The eight ranks of a node send the traffic of one ring over all of their adapters.
    ring = 15 / 16 * size / 8 / 0.85e9
    assert slow.collective("all_gather", size, Link(16, 8)) == close(30e-6 + ring)
    alone = slow.collective("transfer", size, Link(2, 1))
    assert alone == close(30e-6 + size / 0.85e9)
    measured = round_speeds(network=1e9)
    links = content()["links"] | {"network all_gather": [[2, 2**16, 1e-3], [2, 2**30, 1.0]]}
    measured = round_speeds(network=1e9, links=links)
    assert measured.collective("all_gather", size, Link(2, 1)) == close(1.0)


class Queue(LinkedChip):
    """LinkedChip whose operators take as many seconds as they have bytes."""

    def __init__(self):
        links = {"tp": Link(2, 2)}
        speeds = round_speeds()
        speeds.seconds_of = lambda operator: float(operator.num_bytes)
        speeds.collective = lambda kind, num_bytes, link: float(num_bytes)
        super().__init__(speeds, links, eager=False)


def test_a_collective_in_flight_is_hidden_by_what_runs_beside_it():
    sums = Operator("all_reduce", "collective", num_bytes=3, axis="tp")
    flight = Operator("all_gather", "collective", num_bytes=3, axis="tp", number=1)
    wait = Operator("wait", "collective", axis="tp", number=1)
    work = Operator("add", "pass", num_bytes=4)
    free = Operator("view", "free")
    times = Queue().times_of([(work, free, sums), (flight, work, wait), (flight, wait, work)])
    assert (times["forward"], times["forward exposed tp"]) == (7, 3)
    # What it hides costs a quarter of it.
    assert (times["input_half"], times["input_half exposed tp"]) == (4.75, 0.75)
    assert (times["weight_half"], times["weight_half exposed tp"]) == (7, 3)


def test_the_host_is_counted_where_it_launches_the_operators():
    speeds = round_speeds()
    operators = (Operator("add", "pass", num_bytes=8),) * 3
    eager = LinkedChip(speeds, {}, eager=True).times_of([operators, (), ()])
    assert eager["forward host"] == close(3 * speeds.host["forward"])
    assert 1e-6 < speeds.host["forward"] < 1e-4
    assert "forward host" not in LinkedChip(speeds, {}, eager=False).times_of([operators, (), ()])


def test_speeds_of_kernels_come_from_models_that_ran():
    models = {
        "model dense": {
            "host": [1, 1],
            "kernels": {"_rotate_in_place": [2.0, 2.0], "other": [1, 1]},
        }
    }
    speeds = round_speeds(models=models)
    # Two layers rotate in place queries and keys of 4,096 tokens, in both of their passes or one.
    assert set(speeds.kernels) == {"_rotate_in_place"}
    operator = Operator("_rotate_in_place", "kernel", num_bytes=2**26)
    rate = speeds.kernels["_rotate_in_place"]
    assert speeds.seconds_of(operator) == close(speeds.latency + 2**26 / rate)
    assert rate < MEMORY / 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "no file of speeds of this version: its format is 2"),
        ({"calls": {}}, "has no times of passes.*it is missing.*doctor --calibrate"),
        (
            {"calls": {}, "failures": {"calls: passes": "RuntimeError: broken"}},
            "has no times of passes.*RuntimeError: broken",
        ),
    ],
)
def test_files_that_lack_something_are_refused(changes, message):
    with pytest.raises(ParallelPlanError, match=message):
        round_speeds(**changes)


def test_missing_links_are_named_where_they_are_needed(tmp_path):
    speeds = round_speeds(links={})
    with pytest.raises(ParallelPlanError, match="no times of all_reduce, which 2 ranks need"):
        speeds.collective("all_reduce", 8, Link(2, 2))
    with pytest.raises(ParallelPlanError, match=r"'.*none.json' cannot be read"):
        ChipSpeeds.read(tmp_path / "none.json", 50e9)
    file = tmp_path / "speeds.json"
    file.write_text(json.dumps(content()))
    assert math.isclose(ChipSpeeds.read(file, 50e9).latency, LATENCY, rel_tol=0.1)


def test_a_chip_with_slower_memory_is_derived():
    slow = ChipSpeeds(with_other_memory(content(), 0.5), "derived", 50e9)
    speeds = round_speeds()
    assert slow.seconds_of_pass(2**30) == close(2 * speeds.seconds_of_pass(2**30))
    assert slow.optimizer(2**29) == close(2 * speeds.optimizer(2**29))
    large = product(4096, 4096, 4096)
    assert slow.seconds_of(large) == close(speeds.seconds_of(large))
