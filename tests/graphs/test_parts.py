"""Small parts of graphs: agreement, cuts, counters, inputs, memory and reports."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_megatron.graphs.agreement import failure_of_any
from lightning_megatron.graphs.backend import collection_paused
from lightning_megatron.graphs.graph_keys import BatchForm
from lightning_megatron.graphs.recording import RecordingInputs
from lightning_megatron.graphs.report import GraphCounts, report_line, runs_of
from lightning_megatron.graphs.step_graph import StaticInputs, reason_against
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.journal import DeviceCounter, Journal
from lightning_megatron.pipeline.microbatch import Microbatch
from lightning_megatron.plan.cuda_graphs import CudaGraphs

CPU = torch.device("cpu")


# ---- inputs of a captured step


def microbatches(value: float, **more: object) -> list[Microbatch]:
    shared = torch.full((2,), value)
    return [Microbatch({"x": shared, "more": [shared, 1, "text"], **more}, 2)]


def test_a_step_may_remove_entries_from_the_copies_of_its_microbatches():
    inputs = StaticInputs(microbatches(1.0))
    for value in (1.0, 2.0):
        inputs.fill(microbatches(value))
        (part,) = inputs.microbatches
        assert part.data.pop("x").tolist() == [value, value]
        part.data["more"].clear()
    (part,) = inputs.microbatches
    assert part.data["x"] is part.data["more"][0], "a shared tensor is copied once"


def test_forms_of_microbatches_differ_in_all_that_a_graph_assumes():
    form = BatchForm.of(microbatches(1.0))
    assert form == BatchForm.of(microbatches(2.0))
    x = torch.ones(2)
    others = {
        "2 microbatches, captured for 1": [*microbatches(1.0), *microbatches(1.0)],
        "x (3,), captured for (2,)": [Microbatch({"x": torch.ones(3)}, 2)],
        "captured for (2,) torch.float32": [Microbatch({"x": x.long()}, 2)],
        "of 1 samples": [Microbatch(microbatches(1.0)[0].data, 1)],
        "['more'][0]": [Microbatch({"x": x, "more": [x.clone(), 1, "text"]}, 2)],
        "int 2, captured for int 1": [Microbatch({"x": x, "more": [x, 2, "text"]}, 2)],
    }
    for words, parts in others.items():
        assert words in ", ".join(BatchForm.of(parts).difference_from(form))


def test_values_that_a_graph_would_keep_are_refused():
    assert reason_against(microbatches(1.0), CPU) is None
    for value, words in (
        (object(), "is a object, whose values a graph would keep"),
        (torch.ones(2, requires_grad=True), "needs a gradient"),
        (torch.ones(2).to_sparse(), "with layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "is on meta"),
    ):
        assert words in (reason_against(microbatches(1.0, other=value), CPU) or "")


# ---- agreement, and parts that a device has begun


def test_a_message_of_a_failed_capture_is_short():
    message = failure_of_any(
        "step: RuntimeError: " + "x" * 9999, MeshAxis("world_cpu"), CudaGraphs("full")
    )
    assert message is not None
    assert len(message) < 500


def test_parts_are_recorded_only_for_a_device_counter():
    journal = Journal()
    with journal.recording("a piece"):
        journal.note("all_reduce", "dp", (0, 1))
    assert journal.parts == []
    journal.device = DeviceCounter(CPU)
    journal.begin_part("eager")
    for part in ("", "F of microbatch 0 in chunk 0"):
        with journal.recording("a piece"):
            if part:
                journal.begin_part(part)
                journal.note("all_reduce", "dp", (0, 1))
            journal.note("all_reduce", "dp", (0, 1))
        assert journal.parts == [part or "a piece"]


# ---- garbage collection


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_paused_during_captures_and_sees_their_objects_afterwards(
    was_enabled,
):
    before = gc.get_freeze_count()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collection_paused():
            assert not gc.isenabled()
            graphs = [[number] for number in range(100)]
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert gc.get_freeze_count() <= before
    assert all(gc.is_tracked(graph) for graph in graphs)


# ---- memory of recordings


def test_an_input_that_is_read_in_place_keeps_its_address():
    square = torch.zeros(3, 3)
    inputs = RecordingInputs([square], lambda tensor: True)
    assert inputs.fit([square])
    assert not inputs.fit([square.clone()])
    copied = RecordingInputs([square], lambda tensor: False)
    copied.fill([torch.arange(9.0).view(3, 3).t()])
    assert torch.equal(copied.tensors[0], torch.arange(9.0).view(3, 3).t())
    assert copied.fit([square.clone()])


# ---- report


def test_a_line_names_captured_and_eager_parts_with_reasons():
    eager = {
        "layers 4": "hook Probe.see",
        "layers 5": "hook Probe.see",
        "experts": "it reads sizes",
    }
    counts = GraphCounts(40, 2, 4, 2, 1.24)
    assert report_line("segments", ("layers 0..3", "head"), counts, eager) == (
        "CUDA graphs (segments): layers 0..3, head in 40 graphs (4 slots, "
        "2 shapes, 2 for evaluation), captured in 1.24 s. "
        "Eager: layers 4, layers 5: hook Probe.see; experts: it reads sizes."
    )
    one = report_line("full", ("the whole step",), GraphCounts(1))
    assert one == "CUDA graphs (full): the whole step in 1 graph, captured in 0.00 s."
    none = report_line("segments", (), GraphCounts(), {"Net": "it has none"})
    assert none == "CUDA graphs (segments): nothing is captured. Eager: Net: it has none."


def test_neighbouring_parts_are_joined_into_runs_and_complete_layers_into_ranges():
    assert runs_of("abcdef", ("c", "f")) == ("a to b", "d to e")
    assert runs_of("abc", "b") == ("a", "c")
    assert runs_of("ab", "ab") == ()
    names = ["embedding", *(f"layers.{n}.{part}" for n in range(4) for part in ("a", "b")), "head"]
    assert runs_of(names, ()) == ("embedding", "layers 0..3", "head")
    without = runs_of(names, ("embedding", "layers.1.b"))
    assert without == ("layer 0", "layers.1.a", "layers 2..3", "head")
