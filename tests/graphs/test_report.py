"""One log line names the captured parts, the eager parts and the reasons."""

from __future__ import annotations

from lightning_megatron.graphs.report import GraphCounts, GraphReport, runs_of


def test_a_line_names_captured_and_eager_parts_with_reasons() -> None:
    report = GraphReport(
        "segments",
        ("layers 0..3", "head"),
        GraphCounts(40, 2, (3, 1), 2, 1.24),
        {
            "layers 4": "hook Probe.see",
            "layers 5": "hook Probe.see",
            "experts": "all_to_all reads sizes",
        },
        ("Logged numbers are frozen.",),
    )
    assert report.line() == (
        "CUDA graphs (segments): layers 0..3, head in 40 graphs (slots of its chunks: 3, 1, "
        "2 shapes, 2 for evaluation), captured in 1.24 s. "
        "Eager: layers 4, layers 5: hook Probe.see; experts: all_to_all reads sizes. "
        "Logged numbers are frozen."
    )


def test_a_single_graph_and_no_graph_are_reported() -> None:
    assert GraphReport("full", ("the whole step",), GraphCounts(1)).line() == (
        "CUDA graphs (full): the whole step in 1 graph, captured in 0.00 s."
    )
    report = GraphReport("segments", (), eager={"Net": "it has no segments"})
    assert report.line() == (
        "CUDA graphs (segments): nothing is captured. Eager: Net: it has no segments."
    )


def test_neighbouring_parts_are_joined_into_runs() -> None:
    assert runs_of("abcdef", ("c", "f")) == ("a to b", "d to e")
    assert runs_of("abc", "b") == ("a", "c")
    assert runs_of("ab", "ab") == ()


def test_complete_layers_are_named_as_a_range() -> None:
    names = ["embedding", *(f"layers.{n}.{part}" for n in range(4) for part in ("a", "b")), "head"]
    assert runs_of(names, ()) == ("embedding", "layers 0..3", "head")
    assert runs_of(names, ("embedding", "layers.1.b")) == (
        "layer 0",
        "layers.1.a",
        "layers 2..3",
        "head",
    )
