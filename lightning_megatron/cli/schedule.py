"""The subcommand ``schedule``: simulate, compare and draw pipeline schedules."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path

from lightning_megatron.cli.arguments import at_least_one, picture_file
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
from lightning_megatron.plan.schedule import NAMED_SCHEDULES, SCHEDULE_NAMES, build_schedule

DESCRIPTION = """Simulate a pipeline schedule, or compare all of them: step time, bubble and memory.
No process starts, and no GPU is needed."""
EXAMPLE = """examples:
  lightning-megatron schedule --name zb-v --pp 4 --microbatches 8 --png timeline.png
  lightning-megatron schedule --compare --pp 4 --microbatches 16 --costs costs.yaml"""
IN_FLIGHT = "in flight: microbatches whose activations a rank keeps, counted for each chunk"


def main(args: Sequence[str] | None = None) -> None:
    """Run the subcommand.

    Args:
        args: Arguments after the name of the subcommand; None uses those of this process.

    Raises:
        ParallelPlanError: If sizes, costs or the schedule are not legal.
        CorruptDataError: If the file of costs cannot be read.
        MissingExtraError: If ``--png`` is given and matplotlib is not installed.
    """
    options = schedule_parser().parse_args(args)
    names = SCHEDULE_NAMES if options.compare else (options.name,)
    chunks = {name: _chunks_of(name, options) for name in names}
    num_parts = lcm(*chunks.values())
    part = "a stage" if num_parts == 1 else f"1/{num_parts} of a stage"
    source = f"forward, input half and weight half of {part} take a tick each"
    costs = equal_costs(options.pp, num_parts)
    if options.costs is not None:
        source = f"times of {options.costs}"
        costs = read_costs(options.costs, options.pp)
    outcomes = []
    refusals = {}
    for name in names:
        is_alone = not options.compare or name == "interleaved"
        group = options.microbatch_group_size if is_alone else None
        try:
            schedule = build_schedule(name, options.pp, options.microbatches, chunks[name], group)
            outcomes.append(ScheduleOutcome.of(schedule, costs))
        except ParallelPlanError as error:
            if not options.compare:
                raise
            refusals[name] = str(error)
    if options.compare:
        text = _describe_comparison(outcomes, refusals, options, source)
    else:
        text = _describe_outcome(outcomes[0], costs, options.memory, source)
    print(text)
    if options.png is not None and outcomes:
        title = f"pp {options.pp}, {options.microbatches} microbatches"
        draw_schedules(outcomes, options.png, title, text)
        print(f"\ntimelines: {options.png}")


def _chunks_of(name: str, options: argparse.Namespace) -> int:
    """Return the chunks per stage; in a comparison, ``--chunks`` applies to interleaved only."""
    if options.chunks is not None and (name == "interleaved" or not options.compare):
        return int(options.chunks)
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
    lines = [
        f"schedule {schedule.name}: pp {schedule.num_stages}, "
        f"{_microbatches(schedule.num_microbatches)}, {outcome.chunks}",
        f"step {timeline.length} ticks, bubble {timeline.bubble:.1%}; {source}",
        "",
        align_columns(rows),
        "",
        "idle: ticks of the step without computation; waits: those between first and last action",
        IN_FLIGHT,
    ]
    return "\n".join(lines)


def _describe_comparison(
    outcomes: Sequence[ScheduleOutcome],
    refusals: Mapping[str, str],
    options: argparse.Namespace,
    source: str,
) -> str:
    """Return a table with one row for each schedule, and the reasons why others cannot run."""
    limit = float("inf") if options.memory is None else options.memory
    rows = [["schedule", "chunks", "step", "bubble", "waits", "in flight", "activations"]]
    for outcome in outcomes:
        timeline = outcome.timeline
        peak = max(outcome.peaks)
        numbers = [
            str(timeline.length),
            f"{timeline.bubble:.1%}",
            str(max(timeline.waits())),
            str(max(outcome.live)),
            f"{peak:.4g}{'' if is_within(peak, limit) else '*'}",
        ]
        rows.append([outcome.schedule.name, outcome.chunks, *numbers])
    lines = [f"pp {options.pp}, {_microbatches(options.microbatches)}; {source}", ""]
    lines += [align_columns(rows), ""] if outcomes else []
    if any(row[-1].endswith("*") for row in rows):
        lines.append(f"* more than the limit of {limit:g}")
    lines += ["waits, in flight, activations: of the rank with most", IN_FLIGHT]
    if refusals:
        lines += ["", "cannot run at these sizes:"]
    for name, reason in refusals.items():
        lines += textwrap.wrap(
            f"{name}: {reason}", 100, initial_indent="  ", subsequent_indent="    "
        )
    return "\n".join(lines)


def _microbatches(number: int) -> str:
    return f"{number} {'microbatch' if number == 1 else 'microbatches'}"


def schedule_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron schedule",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--name", choices=SCHEDULE_NAMES, metavar="NAME", help="a named schedule")
    which.add_argument("--compare", action="store_true", help="compare all named schedules")

    def add_count(*names: str, text: str, required: bool = False) -> None:
        parser.add_argument(*names, type=at_least_one, required=required, metavar="N", help=text)

    add_count("--pp", text="pipeline stages", required=True)
    add_count("--microbatches", text="microbatches of a step", required=True)
    add_count("--chunks", "--vpp", text="chunks per stage (default: as needed)")
    add_count(
        "--microbatch-group-size",
        "--microbatch_group_size",
        text="microbatches that pass a chunk before the next one starts (interleaved; default: pp)",
    )
    add = parser.add_argument
    add("--costs", type=Path, metavar="FILE", help="times of virtual stages, a YAML or JSON file")
    memory = "activations that a rank may keep, in the unit of the costs (default: microbatches)"
    add("--memory", type=_positive, metavar="SIZE", help=memory)
    picture = "draw the timelines into this .png, .svg or .pdf file"
    add("--png", type=picture_file, metavar="FILE", help=picture)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0: it is {text!r}")
    return value
