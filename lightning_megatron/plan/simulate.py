"""When every action of a schedule runs, if each takes a known time and transfers take none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.schedule import Action, Kind, Schedule

UNIT_COSTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1})
"""Ticks per action: a backward computes two matrix products for each one of the forward."""


@dataclass(frozen=True)
class Span:
    """Say from when to when a stage works on an action.

    Args:
        stage: position on the pp axis.
        action: what it computes.
        start: first tick.
        stop: one past the last tick.
    """

    stage: int
    action: Action
    start: int
    stop: int


@dataclass(frozen=True)
class Timeline:
    """Hold when every action of a schedule runs.

    Args:
        schedule: the schedule that was simulated.
        rows: rows[stage], the spans of its actions, in order.
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> int:
        """Return the ticks until the last stage is done."""
        return max((row[-1].stop for row in self.rows if row), default=0)

    @property
    def bubble(self) -> float:
        """Return the share of all stages' time that is spent waiting."""
        busy = sum(span.stop - span.start for row in self.rows for span in row)
        return 1.0 - busy / (self.length * len(self.rows)) if self.length else 0.0


def consumer_of(schedule: Schedule, stage: int, action: Action) -> tuple[int, Action] | None:
    """Return which stage does what with the result of an action, or None if no other action waits for it.

    A forward feeds the forward of the next virtual stage, a backward (or input gradient) the backward of the last one.
    """
    if action.kind == "W":
        return None
    virtual = schedule.virtual_stage(stage, action.chunk) + (1 if action.kind == "F" else -1)
    if not 0 <= virtual < schedule.num_stages * schedule.num_chunks:
        return None
    chunk, consumer = divmod(virtual, schedule.num_stages)
    return consumer, Action(_kind_after(schedule, consumer, action, chunk), chunk, action.microbatch)


def simulate(schedule: Schedule, costs: Mapping[str, int] = UNIT_COSTS) -> Timeline:
    """Run a schedule on a clock: every stage takes its actions in order, each as soon as its input is there.

    Args:
        schedule: the order of work.
        costs: ticks per kind of action, at least 1 each.

    Raises:
        ParallelPlanError: if stages wait for each other for ever.
    """
    ready: dict[tuple[int, Action], int] = {}  # when an action's input from another virtual stage arrives
    waiting = {
        target
        for stage, row in enumerate(schedule.rows)
        for action in row
        if (target := consumer_of(schedule, stage, action)) is not None
    }
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(schedule.rows):
            while len(spans[stage]) < len(row):
                action = row[len(spans[stage])]
                if (stage, action) in waiting and (stage, action) not in ready:
                    break
                free = spans[stage][-1].stop if spans[stage] else 0
                start = max(free, ready.get((stage, action), 0))
                span = Span(stage, action, start, start + costs[action.kind])
                spans[stage].append(span)
                progress = True
                target = consumer_of(schedule, stage, action)
                if target is not None:
                    ready[target] = span.stop
    stuck = [(stage, row[len(spans[stage])]) for stage, row in enumerate(schedule.rows) if len(spans[stage]) < len(row)]
    if stuck:
        stage, action = stuck[0]
        raise ParallelPlanError(
            f"schedule {schedule.name!r} is not legal: its stages wait for each other. Stage {stage} waits for the "
            f"input of {action.kind} of microbatch {action.microbatch} in chunk {action.chunk}, which never comes."
        )
    return Timeline(schedule, tuple(tuple(row) for row in spans))


def render(schedule: Schedule) -> str:
    """Draw a schedule as text: one row per stage, one column per tick.

    A forward is drawn as F and its microbatch, a backward as B and its microbatch over two ticks; with several chunks a
    letter (a for the first) follows.

    Returns:
        the picture, with a line that gives the ticks and the share of them spent waiting.
    """
    timeline = simulate(schedule)
    suffixes = [chr(ord("a") + chunk) for chunk in range(schedule.num_chunks)] if schedule.num_chunks > 1 else [""]
    width = 1 + len(str(schedule.num_microbatches - 1)) + len(suffixes[0]) + 1
    margin = len(f"stage {schedule.num_stages - 1} ")
    header = "".join(f"{tick:<{width}}" for tick in range(timeline.length))
    lines = [" " * margin + header.rstrip()]
    for stage, row in enumerate(timeline.rows):
        cells = ["." for _ in range(timeline.length)]
        for span in row:
            label = f"{span.action.kind}{span.action.microbatch}{suffixes[span.action.chunk]}"
            cells[span.start : span.stop] = [label] + ["-" * (width - 1)] * (span.stop - span.start - 1)
        lines.append(f"stage {stage}".ljust(margin) + "".join(cell.ljust(width) for cell in cells).rstrip())
    lines.append(f"{timeline.length} ticks, {timeline.bubble:.1%} of them waiting")
    return "\n".join(lines)


def _kind_after(schedule: Schedule, consumer: int, action: Action, chunk: int) -> Kind:
    if action.kind == "F":
        return "F"
    split = Action("I", chunk, action.microbatch)
    return "I" if split in schedule.rows[consumer] else "B"
