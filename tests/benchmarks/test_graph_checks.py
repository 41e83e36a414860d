"""The checks of CUDA graphs compare long trainings and report demands that are not met."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import graph_checks
from benchmarks.graph_checks import Row, parser, run, table
from benchmarks.graph_runs import Bits, Peak
from benchmarks.shapes import SHAPES
from lightning_megatron.plan.cuda_graphs import CudaGraphs
from tests.benchmarks.test_graph_timeline import events

SMALL = ["--accelerator", "cpu", "--model", "tiny_llama", "--mixture", "tiny_mixtral"]


def rows_of(*line: str) -> list[Row]:
    """Return the rows of the checks on the CPU."""
    return run(parser().parse_args([*SMALL, *line]))


def test_graphs_keep_all_bits_of_a_training_with_validations_a_save_and_a_load() -> None:
    repetition, bits = rows_of("--checks", "bits", "--modes", "full", "--steps", "10")
    assert repetition.result == "equal in all bits of 10 steps"
    assert bits.result == "equal in all bits of 10 steps, 1 graphs"
    assert bits.demand == "equal"
    assert bits.is_met


def test_a_check_that_cannot_run_is_a_failed_row_and_later_checks_still_run() -> None:
    launches, *waits = rows_of("--checks", "launches", "waits", "--modes", "full")
    assert "0 kernels. Record on a GPU" in launches.result
    assert "| NO |" in launches.line()
    assert [row.setting for row in waits] == ["tiny_llama full", "tiny_mixtral full"]
    assert "| waits | tiny_llama full | none in 8 steps | none | yes |" in table(waits)


def test_launches_of_a_step_are_compared_with_the_limit_of_the_mode() -> None:
    with (
        patch.object(graph_checks, "train"),
        patch.object(graph_checks, "StepTimeline") as timeline,
    ):
        trace = [
            {**event, "args": {"stream": 7, "correlation": number // 2}}
            for number, event in enumerate(events()[1:], start=2)
        ]
        timeline.return_value.events = [*events()[:1], *trace]
        rows = rows_of("--checks", "launches", "--modes", "full", "full+update", "segments")
    demands = [(row.demand, row.is_met) for row in rows if row.demand]
    assert demands == [("1 graphs", True), ("2 graphs", False), ("at most 5 graphs", True)]


def test_growth_of_memory_and_changed_bits_are_reported() -> None:
    def bits(**changed: Any) -> Bits:
        record = Bits(4)
        record.evaluated, record.digests = [1.0, 2.0], [[1], [2]]
        record.in_use = record.taken = {2: 100, 3: 100, 4: 100}
        vars(record).update(changed)
        return record

    assert bits().differences_from(bits()) == {}
    assert bits(digests=[[1], [3]]).differences_from(bits()) == {"parameters": 2}
    (row,) = graph_checks._growth("", bits())
    assert row.is_met
    (row,) = graph_checks._growth("", bits(in_use={2: 100, 3: 100, 4: 2**21}))
    assert not row.is_met


def test_more_memory_for_more_microbatches_is_reported() -> None:
    def record_peak(*arguments: Any, batch: int, **options: Any) -> None:
        peak = arguments[2][0]
        assert isinstance(peak, Peak)
        peak.in_use, peak.reserved = 1000 + batch, 2000

    with patch.object(graph_checks, "train", record_peak):
        *_, last = rows_of("--checks", "memory")
    assert last.result == "+5.6% in use, +0.0% reserved"
    assert not last.is_met


@pytest.mark.parametrize("gib", [40, 80])
def test_the_number_of_layers_follows_from_the_memory_of_the_device(gib: int) -> None:
    graphs = CudaGraphs("segments")
    with patch.object(torch.cuda, "mem_get_info", lambda: (gib * 2**30, 0)):
        number = graph_checks.layers_that_fit(SHAPES["qwen3_12"], graphs)
    # A layer takes 11.5 GiB, mostly for its 128 experts, and the rest of the model 22 GiB.
    assert number == {40: 1, 80: 4}[gib]
