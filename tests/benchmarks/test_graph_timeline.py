"""The timeline of a step has the calls and kernels of one step, and its picture draws them."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.graph_timeline import Panel, main, measure, parser, picture
from benchmarks.step_timeline import GRAPHS, LAUNCHES, Timeline, timeline_of

GEMM = "nvjet_sm90_tst_256x128"
FLASH = "flash_fwd_kernel"


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    """Return an event of a trace (µs)."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": 7}}


def step(begin: float, length: float) -> list[dict[str, Any]]:
    """Return a step: three launches, three kernels with a gap, and a wait for the last kernel."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", begin + 10, 5),
        event("kernel", GEMM, begin + 20, 100),
        event("cuda_runtime", "cudaGraphLaunch", begin + 30, 10),
        event("kernel", GEMM, begin + 120, 80),
        event("cuda_runtime", "cudaMemcpyAsync", begin + 50, 4),
        event("kernel", FLASH, begin + length - 100, 90),
        event("cuda_runtime", "cudaDeviceSynchronize", begin + 60, length - 60),
    ]


def events() -> list[dict[str, Any]]:
    """Return a trace of three steps of 400, 500 and 900 µs, and an empty time between two waits."""
    first = [event("cuda_runtime", "cudaDeviceSynchronize", 90, 10)]
    empty = [event("cuda_runtime", "cudaDeviceSynchronize", 1000, 20)]
    return [*first, *step(100, 400), *step(500, 500), *empty, *step(1020, 900)]


def test_the_timeline_has_the_calls_and_kernels_of_the_step_of_median_length() -> None:
    timeline = timeline_of(events())
    assert timeline.num_launches == {LAUNCHES: 2, GRAPHS: 1}
    assert timeline.host[GRAPHS] == [(0.03, 0.04)]
    assert timeline.host[LAUNCHES] == [(0.01, 0.015), (0.05, 0.054)]
    # Two kernels of one class without a gap are one interval.
    assert timeline.device == {"matmul": [(0.02, 0.2)], "attention": [(0.4, 0.49)]}
    assert timeline.duration == pytest.approx(0.49)
    assert timeline.idle == pytest.approx(0.02 + 0.2)
    assert Timeline.of_dict(json.loads(json.dumps(timeline.as_dict()))) == timeline


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 calls and 0 kernels. Record on a GPU"):
        timeline_of([event("cuda_runtime", "cudaDeviceSynchronize", 0, 1)])


def test_the_picture_draws_all_steps_with_one_scale() -> None:
    short = timeline_of(events())
    long = Timeline(
        2 * short.duration, {LAUNCHES: [(0.0, 0.98)]}, {"matmul": [(0.0, 0.98)]}, {LAUNCHES: 40}
    )
    text = picture([Panel("eager", long), Panel("full", short)], "One step")
    root = xml.etree.ElementTree.fromstring(text)
    grey = [
        float(element.get("width", "")) for element in root.iter() if element.get("fill") == "#eee"
    ]
    assert grey == [860.0, 860.0, 430.0, 430.0], "host and device of both steps"
    titles = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "eager: 1.0 ms; 40 launches of kernels; nothing runs for 0.0 ms" in titles
    assert "full: 0.5 ms; 1 launch of graphs, 2 launches of kernels; nothing runs for 0.2 ms" in (
        titles
    )


def test_each_mode_is_trained_and_saved_measurements_are_drawn_again(tmp_path: Path) -> None:
    line = ["--model", "tiny_llama", "--accelerator", "cpu", "--warmup", "4"]
    line += ["--modes", "eager", "full"]
    numbers_of_steps: list[int] = []

    def read(trace: list[dict[str, Any]]) -> Timeline:
        # A CPU launches no kernels on a device, but the profiler records the steps.
        numbers_of_steps.append(
            sum(entry.get("name", "").startswith("ProfilerStep") for entry in trace)
        )
        return timeline_of(events())

    panels = measure(parser().parse_args(line), read)
    assert [panel.name for panel in panels] == ["eager", "full"]
    assert all(number >= 3 for number in numbers_of_steps), numbers_of_steps
    measured, svg = tmp_path / "measured.json", tmp_path / "step.svg"
    steps = {panel.name: panel.timeline.as_dict() for panel in panels}
    measured.write_text(json.dumps({"title": "One step", "steps": steps}))
    arguments = ["graph_timeline", "--measured", str(measured), "--svg", str(svg)]
    with patch("sys.argv", arguments):
        main()
    assert svg.read_text() == picture(panels, "One step")
