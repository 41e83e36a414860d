"""Picture of a training step without and with CUDA graphs, drawn from measured traces.

    python -m benchmarks.graph_timeline --svg docs/cuda_graphs_step.svg
    python -m benchmarks.graph_timeline --measured runs/graph_timeline.json --svg step.svg

The first command trains a few steps of each mode on one GPU (about a minute), writes the measured
timelines to ``--measured``, and draws them. If ``--measured`` exists, nothing is trained.
Each mode has two rows on one scale of time: launches by the host, and work on the device by class
of kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.graph_runs import be_quiet, train
from benchmarks.shapes import SHAPES
from benchmarks.step_profile import Interval, union
from benchmarks.step_timeline import GRAPHS, LAUNCHES, StepTimeline, Timeline, timeline_of

MODES = ("eager", "segments", "full", "full+update")
_COLORS = {
    LAUNCHES: "#777",
    GRAPHS: "#d81b60",
    "matmul": "#3949ab",
    "attention": "#00897b",
    "elementwise and reductions": "#7cb342",
    "optimizer": "#fb8c00",
    "copy and fill": "#8e24aa",
    "communication": "#e53935",
    "router": "#6d4c41",
    "permutes": "#c0ca33",
}
_STYLE = "font-family='sans-serif' font-size='13' fill='#333'"
_LEFT = 70
_WIDTH = 860
_PANEL = 84
_BAR = 22
_TOP = 62
#: Length below which gaps are not drawn (pixels).
_FINEST = 0.4


@dataclass(frozen=True)
class Panel:
    """Measured step of one mode.

    Args:
        name: Name of the mode.
        timeline: The step.
    """

    name: str
    timeline: Timeline

    def title(self) -> str:
        """Return a title with the mode and its figures."""
        timeline = self.timeline
        calls = [
            f"{number} {kind if number > 1 else kind.replace('launches', 'launch')}"
            for kind in (GRAPHS, LAUNCHES)
            if (number := timeline.num_launches.get(kind))
        ]
        idle = f"nothing runs for {timeline.idle:.1f} ms"
        return f"{self.name}: {timeline.duration:.1f} ms; {', '.join(calls)}; {idle}"


def measure(
    args: argparse.Namespace, read: Callable[[Sequence[dict[str, Any]]], Timeline] = timeline_of
) -> list[Panel]:
    """Train with each mode and return a step of each.

    Args:
        args: Arguments of the program.
        read: Function that finds a step in the events of a trace.
    """
    panels = []
    for mode in args.modes:
        callback = StepTimeline(args.warmup)
        train(SHAPES[args.model], mode, [callback], callback.last, args.accelerator)
        panels.append(Panel(mode, read(callback.events)))
        print(panels[-1].title(), flush=True)
    return panels


def picture(panels: Sequence[Panel], title: str) -> str:
    """Return an SVG picture of the steps, one below the other on one scale of time.

    Args:
        panels: The steps.
        title: Heading of the picture.
    """
    longest = max(panel.timeline.duration for panel in panels)
    scale = _WIDTH / longest
    width, height = _LEFT + _WIDTH + 20, _TOP + _PANEL * len(panels) + 34
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='10' y='20' {_STYLE}>{title}</text>",
        *_legend(panels),
    ]
    for number, panel in enumerate(panels):
        y = _TOP + _PANEL * number
        lines.append(f"<text x='10' y='{y + 14}' {_STYLE}>{panel.title()}</text>")
        rows = {"host": panel.timeline.host, "device": panel.timeline.device}
        for row, (name, kinds) in enumerate(rows.items()):
            top = y + 20 + row * (_BAR + 4)
            lines.append(f"<text x='10' y='{top + 16}' {_STYLE}>{name}</text>")
            lines.append(
                f"<rect x='{_LEFT}' y='{top}' width='{panel.timeline.duration * scale:.1f}' "
                f"height='{_BAR}' fill='#eee'/>"
            )
            lines += [_bars(kind, spans, top, scale) for kind, spans in kinds.items()]
    return "\n".join([*lines, *_axis(longest, scale, height), "</svg>"]) + "\n"


def _legend(panels: Sequence[Panel]) -> list[str]:
    kinds = {kind for panel in panels for kind in (*panel.timeline.host, *panel.timeline.device)}
    lines = []
    x = 10
    for kind in [kind for kind in _COLORS if kind in kinds]:
        lines.append(f"<rect x='{x}' y='32' width='12' height='12' fill='{_COLORS[kind]}'/>")
        lines.append(f"<text x='{x + 16}' y='43' {_STYLE}>{kind}</text>")
        x += 34 + 7 * len(kind)
    return lines


def _bars(kind: str, spans: Sequence[Interval], top: int, scale: float) -> str:
    """Return intervals as one SVG path, in which intervals with invisible gaps are merged."""
    bars = [(start * scale, max(stop, start) * scale + _FINEST) for start, stop in spans]
    shapes = [
        f"M{_LEFT + start:.1f} {top}h{max(stop - start - _FINEST, 0.3):.1f}v{_BAR}"
        f"H{_LEFT + start:.1f}z"
        for start, stop in union(bars)
    ]
    return f"<path fill='{_COLORS[kind]}' d='{''.join(shapes)}'/>"


def _axis(longest: float, scale: float, height: int) -> list[str]:
    """Return the time axis below the panels, with at most about twelve marks."""
    interval = next(
        candidate
        for candidate in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
        if longest / candidate <= 12
    )
    lines = []
    for number in range(int(longest / interval) + 1):
        x = _LEFT + number * interval * scale
        lines.append(f"<path stroke='#aaa' d='M{x:.1f} {height - 30}v6'/>")
        label = f"{number * interval:g} ms"
        lines.append(f"<text x='{x - 8:.1f}' y='{height - 10}' {_STYLE}>{label}</text>")
    return lines


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="tiny", choices=list(SHAPES))
    result.add_argument("--modes", nargs="+", default=MODES, help="modes of benchmarks.graphs")
    result.add_argument("--warmup", type=int, default=12, help="steps before the recorded ones")
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument(
        "--measured", default="runs/graph_timeline.json", help="file of the measured timelines"
    )
    result.add_argument("--svg", default="runs/graph_timeline.svg", help="file of the picture")
    return result


def main() -> None:
    """Measure the timelines unless their file exists, and draw them."""
    args = parser().parse_args()
    be_quiet()
    path = Path(args.measured)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        steps = {panel.name: panel.timeline.as_dict() for panel in measure(args)}
        name = torch.cuda.get_device_name()
        path.write_text(
            json.dumps({"title": f"One step of {args.model} on one {name}", "steps": steps})
        )
    measured = json.loads(path.read_text())
    panels = [
        Panel(name, Timeline.of_dict(timeline)) for name, timeline in measured["steps"].items()
    ]
    Path(args.svg).write_text(picture(panels, measured["title"]))
    print(f"drawn: {args.svg}", flush=True)


if __name__ == "__main__":
    main()
