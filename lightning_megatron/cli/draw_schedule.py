"""Pictures of the timelines of schedules: a row is a rank, a box is a computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_megatron.cli.draw_layout import INK, MAX_PIXELS, SOFT_INK, ink_on
from lightning_megatron.cli.schedule_costs import ScheduleOutcome
from lightning_megatron.extras import import_extra
from lightning_megatron.plan.simulate import Span

#: Colours of computations, and their names in the legend.
LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "F": ("#3f7fbf", "forward"),
        "B": ("#c9752b", "backward"),
        "I": ("#e0a526", "input half"),
        "W": ("#4f9d58", "weight half"),
    }
)

# Lengths in inches.
ROW = 0.26
PANEL_EDGES = 0.36
HEADER = 0.75
MEMORY_WIDTH = 1.6
MARGIN = 0.8
TIMELINE_WIDTHS = (8.5, 26.0)
BOX_WIDTH = 0.16

#: Fraction of white in the colour of the first chunk; later chunks are darker.
LIGHTEST = 0.55
#: Width of a digit relative to its font size; smallest legible and largest font size (points).
DIGIT = 0.62
SMALLEST_FONT = 3.5
LARGEST_FONT = 7.5


def draw_schedules(
    outcomes: Sequence[ScheduleOutcome], path: str | Path, title: str, description: str
) -> None:
    """Draw the timelines of schedules below each other, with the memory of every rank beside them.

    All timelines share one scale of time, and all bars share one scale of memory. A box shows the
    index of its microbatch, from 0, unless the box is too narrow.

    Args:
        outcomes: Simulated schedules, at least one.
        path: File to write; its suffix (.png, .svg, .pdf) selects the format.
        title: Title above the timelines.
        description: Text for the metadata of the file, if its format has metadata.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    figures = import_extra("matplotlib.figure", "plot")
    patches = import_extra("matplotlib.patches", "plot")
    length = max(outcome.timeline.length for outcome in outcomes)
    largest_peak = max(max(outcome.peaks) for outcome in outcomes)
    rows = [row for outcome in outcomes for row in outcome.schedule.rows]
    boxes = max(map(len, rows))
    across = min(max(TIMELINE_WIDTHS[0], boxes * BOX_WIDTH), TIMELINE_WIDTHS[1])
    heights = [ROW * outcome.schedule.num_stages + PANEL_EDGES for outcome in outcomes]
    width = across + MEMORY_WIDTH + MARGIN
    height = HEADER + sum(heights)
    figure = figures.Figure(figsize=(width, height), facecolor="white", layout="constrained")
    figure.suptitle(title, size=11, weight="bold", color=INK)
    ratios = {"height_ratios": heights, "width_ratios": [across, MEMORY_WIDTH]}
    panels = figure.subplots(len(outcomes), 2, squeeze=False, gridspec_kw=ratios)
    for outcome, (timeline, memory) in zip(outcomes, panels, strict=True):
        timeline.set_xlim(0, max(length, 1))
        memory.set_xlim(0, largest_peak * 1.3 or 1)
        _draw_timeline(timeline, outcome, 72 * across / max(length, 1))
        _draw_memory(memory, outcome)
        timeline.get_xaxis().set_visible(outcome is outcomes[-1])
    used = {action.kind for row in rows for action in row}
    looks = [look for kind, look in LOOKS.items() if kind in used]
    handles = [patches.Patch(facecolor=colour, label=word) for colour, word in looks]
    if max(outcome.schedule.num_chunks for outcome in outcomes) > 1:
        handles.append(patches.Patch(facecolor="none", label="darker: later chunk"))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8
    )
    metadata = {"Title": title}
    if Path(path).suffix.lower() != ".pdf":
        metadata["Description"] = description
    figure.savefig(path, dpi=min(110.0, MAX_PIXELS / max(width, height)), metadata=metadata)


def _draw_timeline(axes: Any, outcome: ScheduleOutcome, points: float) -> None:
    """Draw the boxes of every rank; a tick is ``points`` wide."""
    timeline = outcome.timeline
    num_chunks = outcome.schedule.num_chunks
    title = (
        f"{outcome.schedule.name}, {outcome.chunks}: step {timeline.length}, "
        f"bubble {timeline.bubble:.1%}, activations {max(outcome.peaks):.4g}"
    )
    axes.set_title(title, size=8.5, color=INK, loc="left", pad=3)
    for rank, row in enumerate(timeline.rows):
        boxes = [(span.start, span.stop - span.start) for span in row]
        colours = [_colour(span, num_chunks) for span in row]
        axes.broken_barh(
            boxes, (rank - 0.46, 0.92), facecolors=colours, edgecolors="white", linewidth=0.4
        )
        for span in row:
            _number(axes, span, num_chunks, points)
    _label_ranks(axes, outcome.schedule.num_stages)
    ranks = range(outcome.schedule.num_stages)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(length=0, labelsize=7, colors=SOFT_INK)
    axes.set_facecolor("#f5f7fa")


def _number(axes: Any, span: Span, num_chunks: int, points: float) -> None:
    text = str(span.action.microbatch)
    size = min(LARGEST_FONT, (span.stop - span.start) * points / (DIGIT * (len(text) + 0.6)))
    if size < SMALLEST_FONT:
        return
    middle = (span.start + span.stop) / 2
    ink = ink_on(_colour(span, num_chunks))
    axes.text(middle, span.stage, text, size=size, color=ink, ha="center", va="center_baseline")


def _draw_memory(axes: Any, outcome: ScheduleOutcome) -> None:
    """Draw a bar for the activations that each rank keeps at most."""
    ranks = range(outcome.schedule.num_stages)
    bars = axes.barh(ranks, outcome.peaks, height=0.6, color="#9aa5b1")
    axes.bar_label(bars, fmt=" {:.3g}", size=6.5, color=SOFT_INK)
    _label_ranks(axes, outcome.schedule.num_stages)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_title("activations", size=7, color=SOFT_INK, loc="left", pad=3)


def _label_ranks(axes: Any, num_stages: int) -> None:
    axes.set_ylim(num_stages - 0.5, -0.5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _colour(span: Span, num_chunks: int) -> str:
    base, _ = LOOKS[span.action.kind]
    later = span.action.chunk / (num_chunks - 1) if num_chunks > 1 else 0.5
    white = LIGHTEST * (1 - later)
    parts = [int(base[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)
