"""The subcommand ``schedule``: simulate, compare and draw pipeline schedules."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.cli.arguments import new_file, picture_file
from lightning_megatron.cli.draw_schedule import draw_schedules
from lightning_megatron.cli.schedule_costs import PipelineCosts, equal_costs, read_costs
from lightning_megatron.cli.schedule_outcome import (
    NAMES,
    PipelineSizes,
    ScheduleOutcome,
    compare,
    named_outcome,
    parts_of,
    simulated,
)
from lightning_megatron.cli.schedule_table import describe_comparison, describe_outcome
from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.live_microbatches import check_peak
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.schedule_csv import format_schedule, read_schedule
from lightning_megatron.plan.settings import join_or, require_positive

DESCRIPTION = """Simulate a pipeline schedule, or compare all of them: step time, bubble and memory.
No process starts, and no GPU is needed."""
EXAMPLE = """examples:
  lightning-megatron schedule --name zb-v --pp 4 --microbatches 8 --png timeline.png
  lightning-megatron schedule --compare --pp 4 --microbatches 16 --costs costs.yaml
  lightning-megatron schedule --name zb-h1 --pp 4 --microbatches 8 --csv mine.csv
  lightning-megatron schedule --compare --name mine.csv"""
CSV = ".csv"


def main(args: Sequence[str] | None = None) -> None:
    """Run the subcommand.

    Args:
        args: Arguments after the name of the subcommand; None uses those of this process.

    Raises:
        ParallelPlanError: If sizes, costs or the schedule are not legal.
        CorruptDataError: If a file cannot be read.
        MissingExtraError: If ``--png`` is given and matplotlib is not installed.
    """
    parser = argparse.ArgumentParser(prog="lightning-megatron schedule")
    _add_arguments(parser)
    options = parser.parse_args(args)
    if options.name is None and not options.compare:
        parser.error("--name NAME, or --compare, is required")
    if options.compare and options.csv:
        parser.error(
            "--csv writes one schedule, and --compare simulates all: leave one of them out"
        )
    from_file = read_schedule(options.name) if _is_file(options.name) else None
    if from_file is None and (options.pp is None or options.microbatches is None):
        parser.error("--pp and --microbatches are required")
    sizes = _sizes(options, from_file)
    if options.compare:
        _run_comparison(options, sizes, from_file)
    else:
        _run_one(options, sizes, from_file)


def _run_one(options: argparse.Namespace, sizes: PipelineSizes, from_file: Schedule | None) -> None:
    num_chunks = from_file.num_chunks if from_file is not None else sizes.chunks_of(options.name)
    costs, source = _costs(options.costs, sizes, num_chunks)
    if from_file is not None:
        outcome = simulated(from_file, costs)
    else:
        outcome = named_outcome(options.name, sizes, costs, options.memory)
    schedule = outcome.schedule
    if options.memory is not None:
        fitted = costs.of(schedule.placement.num_virtual_stages)
        check_peak(
            schedule, options.memory, fitted.kept_by_stage(schedule), fitted.weight_half_share
        )
    text = describe_outcome(outcome, source)
    print(text)
    _draw(options.png, [outcome], text)
    if options.csv is not None:
        options.csv.write_text(format_schedule(schedule), encoding="utf-8")
        print(f"\nactions: {options.csv}")


def _run_comparison(
    options: argparse.Namespace, sizes: PipelineSizes, from_file: Schedule | None
) -> None:
    schedules = [] if from_file is None else [from_file]
    costs, source = _costs(options.costs, sizes, parts_of(sizes, schedules))
    comparison = compare(sizes, costs, options.memory, schedules)
    text = describe_comparison(comparison, sizes, source, options.memory)
    print(text)
    _draw(options.png, comparison.outcomes, text)


def _draw(path: Path | None, outcomes: Sequence[ScheduleOutcome], text: str) -> None:
    if path is None:
        return
    schedule = outcomes[0].schedule
    title = f"pp {schedule.num_stages}, {schedule.num_microbatches} microbatches"
    draw_schedules(outcomes, path, title, text)
    print(f"\ntimelines: {path}")


def _sizes(options: argparse.Namespace, from_file: Schedule | None) -> PipelineSizes:
    """Return the sizes that the options give, or the sizes of the schedule in the user's file.

    Raises:
        ParallelPlanError: If a size is below 1 or differs from that of the file, or if the name of
            the schedule is unknown.
    """
    if from_file is None:
        if options.name is not None and options.name not in NAMES:
            raise ParallelPlanError(
                f"schedule must be {join_or(NAMES)}, or a file that ends in {CSV}: it is "
                f"{options.name!r}."
            )
        require_positive("pp", options.pp)
        require_positive("num_microbatches", options.microbatches)
        if options.chunks is not None:
            require_positive("vpp", options.chunks)
        return PipelineSizes(
            options.pp, options.microbatches, options.chunks, options.microbatch_group_size
        )
    sizes = {"pp": options.pp, "microbatches": options.microbatches}
    present = {"pp": from_file.num_stages, "microbatches": from_file.num_microbatches}
    # In a comparison, --chunks applies to the named schedules, not to the file.
    if not options.compare:
        sizes["chunks"] = options.chunks
        present["chunks"] = from_file.num_chunks
    for name, size in sizes.items():
        if size not in (None, present[name]):
            raise ParallelPlanError(
                f"--{name} must be that of the file: it is {size}, {options.name} has "
                f"{present[name]}. Leave --{name} out."
            )
    return PipelineSizes(
        from_file.num_stages,
        from_file.num_microbatches,
        options.chunks,
        options.microbatch_group_size,
    )


def _costs(path: Path | None, sizes: PipelineSizes, num_parts: int) -> tuple[PipelineCosts, str]:
    """Return the costs, and a description of their source."""
    if path is not None:
        return read_costs(path, sizes.num_stages), f"times of {path}"
    part = "a stage" if num_parts == 1 else f"1/{num_parts} of a stage"
    return (
        equal_costs(sizes.num_stages, num_parts),
        f"forward, input half and weight half of {part} take a tick each",
    )


def _is_file(name: str | None) -> bool:
    return name is not None and name.lower().endswith(CSV)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--name", metavar="NAME", help=f"{join_or(NAMES)}, or a {CSV} file of your own")
    add("--compare", action="store_true", help="compare all schedules, and --name if it is a file")
    add("--pp", type=int, metavar="N", help="pipeline stages")
    add("--microbatches", type=int, metavar="N", help="microbatches of a step")
    add("--chunks", "--vpp", type=int, metavar="N", help="chunks per stage (default: as needed)")
    add(
        "--microbatch-group-size",
        "--microbatch_group_size",
        type=int,
        metavar="N",
        help="microbatches that pass a chunk before the next one starts (interleaved; default: pp)",
    )
    add("--costs", type=Path, metavar="FILE", help="times of virtual stages, a YAML or JSON file")
    add(
        "--memory",
        type=_positive,
        metavar="SIZE",
        help="activations that a rank may keep, in the unit of the costs (default: microbatches)",
    )
    add(
        "--png",
        type=picture_file,
        metavar="FILE",
        help="draw the timelines into this .png, .svg or .pdf file",
    )
    add("--csv", type=_csv_path, metavar="FILE", help="write the actions into this file")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0: it is {text!r}")
    return value


def _csv_path(text: str) -> Path:
    return new_file(text, (CSV,))
