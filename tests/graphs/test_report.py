"""One line of the log says what is captured, and what is not and why."""

from __future__ import annotations

from lightning_megatron.graphs.report import GraphReport, runs_of


def test_a_line_names_captured_and_eager_parts_with_reasons() -> None:
    report = GraphReport(
        "segments",
        ("layers 0..3", "head"),
        40,
        {
            "layers 4": "hook Probe.see",
            "layers 5": "hook Probe.see",
            "experts": "all_to_all reads sizes",
        },
        ("Logged numbers are frozen.",),
    )
    assert report.line() == (
        "CUDA graphs (segments): layers 0..3, head in 40 graphs. "
        "Eager: layers 4, layers 5: hook Probe.see; experts: all_to_all reads sizes. Logged numbers are frozen."
    )


def test_a_single_graph_and_no_graph_at_all_have_lines() -> None:
    assert GraphReport("full", ("the whole step",), 1).line() == (
        "CUDA graphs (full): the whole step in 1 graph."
    )
    report = GraphReport("segments", (), 0, eager={"Net": "it has no segments"})
    assert report.line() == (
        "CUDA graphs (segments): nothing is captured. Eager: Net: it has no segments."
    )


def test_neighbouring_parts_are_one_run() -> None:
    assert runs_of("abcdef", ("c", "f")) == ("a to b", "d to e")
    assert runs_of("abc", "b") == ("a", "c")
    assert runs_of("ab", "ab") == ()
