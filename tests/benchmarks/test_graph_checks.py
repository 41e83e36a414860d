"""The checks of CUDA graphs compare long trainings, and a demand that is not met is seen."""

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


def found(*line: str) -> list[Row]:
    """Return the rows of the checks on the CPU."""
    return run(parser().parse_args([*SMALL, *line]))


def test_graphs_keep_the_bits_of_a_training_with_validations_a_save_and_a_load() -> None:
    again, bits = found("--checks", "bits", "--modes", "full", "--steps", "10")
    assert again.found == "equal in all bits of 10 steps"
    assert bits.found == "equal in all bits of 10 steps, 1 graphs"
    assert bits.demand == "equal"
    assert bits.is_met


def test_a_check_that_cannot_be_made_is_a_failed_row_and_ends_no_other() -> None:
    launches, *waits = found("--checks", "launches", "waits", "--modes", "full")
    assert "0 kernels. Record on a GPU" in launches.found
    assert "| NO |" in launches.line()
    assert [one.setting for one in waits] == ["tiny_llama full", "tiny_mixtral full"]
    assert "| waits | tiny_llama full | none in 8 steps | none | yes |" in table(waits)


def test_launches_of_a_step_are_compared_with_those_of_the_mode() -> None:
    with (
        patch.object(graph_checks, "train"),
        patch.object(graph_checks, "StepTimeline") as timeline,
    ):
        trace = [
            {**one, "args": {"stream": 7, "correlation": number // 2}}
            for number, one in enumerate(events()[1:], start=2)
        ]
        timeline.return_value.events = [*events()[:1], *trace]
        rows = found("--checks", "launches", "--modes", "full", "full+update", "segments")
    demands = [(row.demand, row.is_met) for row in rows if row.demand]
    assert demands == [("1 graphs", True), ("2 graphs", False), ("at most 5 graphs", True)]


def test_growth_of_memory_and_other_bits_are_seen() -> None:
    def bits(**changed: Any) -> Bits:
        one = Bits(4)
        one.evaluated, one.digests = [1.0, 2.0], [[1], [2]]
        one.in_use = one.taken = {2: 100, 3: 100, 4: 100}
        vars(one).update(changed)
        return one

    assert bits().differences_from(bits()) == {}
    assert bits(digests=[[1], [3]]).differences_from(bits()) == {"parameters": 2}
    (row,) = graph_checks._growth("", bits())
    assert row.is_met
    (row,) = graph_checks._growth("", bits(in_use={2: 100, 3: 100, 4: 2**21}))
    assert not row.is_met


def test_more_memory_for_more_microbatches_is_seen() -> None:
    def measured(*given: Any, batch: int, **options: Any) -> None:
        peak = given[2][0]
        assert isinstance(peak, Peak)
        peak.in_use, peak.reserved = 1000 + batch, 2000

    with patch.object(graph_checks, "train", measured):
        *_, last = found("--checks", "memory")
    assert last.found == "+5.6% in use, +0.0% reserved"
    assert not last.is_met


@pytest.mark.parametrize("gib", [40, 80])
def test_as_many_layers_are_taken_as_the_memory_of_the_device_holds(gib: int) -> None:
    graphs = CudaGraphs("segments")
    with patch.object(torch.cuda, "mem_get_info", lambda: (gib * 2**30, 0)):
        number = graph_checks.layers_that_fit(SHAPES["qwen3_12"], graphs)
    # A layer has 11.5 GiB, most of it for its 128 experts, and the rest of the model 22 GiB.
    assert number == {40: 1, 80: 4}[gib]
