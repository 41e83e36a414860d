"""The command ``schedule``: simulate, compare and draw pipeline schedules."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import inf, lcm
from pathlib import Path

from jsonargparse.typing import PositiveFloat, PositiveInt

from lightning_megatron.cli.draw_layout import check_picture
from lightning_megatron.cli.draw_schedule import draw_schedules
from lightning_megatron.cli.schedule_costs import (
    PipelineCosts,
    ScheduleOutcome,
    equal_costs,
    read_costs,
)
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.columns import align_columns
from lightning_megatron.plan.live_microbatches import check_peak, is_within
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, ScheduleName, build_schedule

EXAMPLES = """examples:
  lightning-megatron schedule --name zb-v --pp 4 --microbatches 8 --png timeline.png
  lightning-megatron schedule --pp 4 --microbatches 16 --costs costs.yaml"""
IN_FLIGHT = "in flight: microbatches whose activations a rank keeps, counted for each chunk"


def schedule(
    name: ScheduleName | None = None,
    pp: PositiveInt = 4,
    microbatches: PositiveInt = 8,
    vpp: PositiveInt | None = None,
    microbatch_group_size: PositiveInt | None = None,
    costs: Path | None = None,
    memory: PositiveFloat | None = None,
    png: Path | None = None,
) -> None:
    """Simulate a pipeline schedule, or compare all of them: step time, bubble and memory.

    No process starts, and no GPU is needed.

    Args:
        name: A named schedule; by default all are compared.
        pp: Pipeline stages.
        microbatches: Microbatches of a step.
        vpp: Chunks per stage; by default as needed. In a comparison, those of interleaved.
        microbatch_group_size: Microbatches that pass a chunk before the next one (interleaved).
        costs: Times of virtual stages, a YAML or JSON file.
        memory: Activations that a rank may keep, in the unit of the costs, by default microbatches.
        png: Draw the timelines into this .png, .svg or .pdf file.

    Raises:
        ParallelPlanError: If sizes, costs or the schedule are not legal.
        CorruptDataError: If the file of costs cannot be read.
        MissingExtraError: If ``--png`` is given and matplotlib is not installed.
    """
    if png is not None:
        check_picture(png)
    names = NAMED_SCHEDULES if name is None else (name,)
    sizes = {one: _chunks_of(one, vpp, name is None) for one in names}
    num_parts = lcm(*sizes.values())
    part = "a stage" if num_parts == 1 else f"1/{num_parts} of a stage"
    source = f"forward, input half and weight half of {part} take a tick each"
    stages = equal_costs(pp, num_parts)
    if costs is not None:
        source = f"times of {costs}"
        stages = read_costs(costs, pp)
    outcomes = []
    refusals = {}
    for one, num_chunks in sizes.items():
        group = microbatch_group_size if one in (name, "interleaved") else None
        try:
            built = build_schedule(one, pp, microbatches, num_chunks, group)
            outcomes.append(ScheduleOutcome.of(built, stages))
        except ParallelPlanError as error:
            if name is not None:
                raise
            refusals[one] = str(error)
    title = f"pp {pp}, {_microbatches(microbatches)}"
    if name is None:
        text = _describe_comparison(outcomes, refusals, memory or inf, f"{title}; {source}")
    else:
        text = _describe_outcome(outcomes[0], stages, memory, source)
    print(text)
    if png is not None and outcomes:
        draw_schedules(outcomes, png, title, text)
        print(f"\ntimelines: {png}")


COMMAND = schedule


def _chunks_of(name: str, given: int | None, compares: bool) -> int:
    if given is not None and (name == "interleaved" or not compares):
        return given
    return NAMED_SCHEDULES[name].chunks or 2


def _describe_outcome(
    outcome: ScheduleOutcome, costs: PipelineCosts, limit: float | None, source: str
) -> str:
    """Return a table of a schedule as text, with one row for each rank."""
    schedule = outcome.schedule
    if limit is not None:
        costs = costs.merged(schedule.placement.num_virtual_stages)
        check_peak(schedule, limit, costs.kept_by_stage(schedule), costs.weight_half_share)
    timeline = outcome.timeline
    rows = [["rank", "busy", "idle", "waits", "in flight", "activations"]]
    figures = zip(timeline.idle(), timeline.waits(), outcome.live, outcome.peaks, strict=True)
    for rank, (idle, waits, live, peak) in enumerate(figures):
        numbers = (rank, timeline.length - idle, idle, waits, live)
        rows.append([*map(str, numbers), f"{peak:.4g}"])
    return f"""\
schedule {schedule.name}: pp {schedule.num_stages}, \
{_microbatches(schedule.num_microbatches)}, {outcome.chunks}
step {timeline.length} ticks, bubble {timeline.bubble:.1%}; {source}

{align_columns(rows)}

idle: ticks of the step without computation; waits: those between first and last action
{IN_FLIGHT}"""


def _describe_comparison(
    outcomes: Sequence[ScheduleOutcome], refusals: Mapping[str, str], limit: float, title: str
) -> str:
    """Return a table with one row for each schedule, and the reasons why others cannot run."""
    rows = [["schedule", "chunks", "step", "bubble", "waits", "in flight", "activations"]]
    for outcome in outcomes:
        timeline = outcome.timeline
        peak = max(outcome.peaks)
        size = f"{peak:.4g}{'' if is_within(peak, limit) else '*'}"
        most = [str(max(each)) for each in (timeline.waits(), outcome.live)]
        bubble = f"{timeline.bubble:.1%}"
        name = outcome.schedule.name
        rows.append([name, outcome.chunks, str(timeline.length), bubble, *most, size])
    lines = [title, ""]
    lines += [align_columns(rows), ""] if outcomes else []
    if any(row[-1].endswith("*") for row in rows):
        lines.append(f"* more than the limit of {limit:g}")
    lines += ["waits, in flight, activations: of the rank with most", IN_FLIGHT]
    lines += ["", "cannot run at these sizes:"] if refusals else []
    wrapper = textwrap.TextWrapper(100, "  ", "    ")
    for name, reason in refusals.items():
        lines += wrapper.wrap(f"{name}: {reason}")
    return "\n".join(lines)


def _microbatches(number: int) -> str:
    return f"{number} {'microbatch' if number == 1 else 'microbatches'}"
