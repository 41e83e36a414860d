"""Text that the subcommand ``schedule`` prints: the ranks of one schedule, or all schedules."""

from __future__ import annotations

import textwrap

from lightning_megatron.cli.schedule_outcome import Comparison, PipelineSizes, ScheduleOutcome
from lightning_megatron.plan.columns import align_columns

IN_FLIGHT = "in flight: microbatches whose activations a rank keeps, counted for each chunk"


def describe_outcome(outcome: ScheduleOutcome, source: str) -> str:
    """Return a table of a schedule as text, with one row for each rank.

    Args:
        outcome: Simulated schedule.
        source: Description of the source of the times.
    """
    timeline = outcome.timeline
    rows = [["rank", "busy", "idle", "waits", "in flight", "activations"]]
    figures = zip(timeline.idle(), timeline.waits(), outcome.live, outcome.peaks, strict=True)
    for rank, (idle, waits, live, peak) in enumerate(figures):
        rows.append(
            [str(rank), *map(str, (timeline.length - idle, idle, waits, live)), f"{peak:.4g}"]
        )
    lines = [
        f"schedule {outcome.label}: pp {outcome.schedule.num_stages}, "
        f"{_microbatches(outcome.schedule.num_microbatches)}, {outcome.chunks}",
        f"step {timeline.length} ticks, bubble {timeline.bubble:.1%}; {source}",
        *_alternatives(outcome),
        "",
        align_columns(rows),
        "",
        "idle: ticks of the step without computation; waits: those between first and last action",
        IN_FLIGHT,
    ]
    return "\n".join(lines)


def describe_comparison(
    comparison: Comparison, sizes: PipelineSizes, source: str, limit: float | None
) -> str:
    """Return a table with one row for each schedule, and the reasons why others cannot run.

    Args:
        comparison: Simulated schedules.
        sizes: Sizes of the pipeline.
        source: Description of the source of the times.
        limit: Limit on the activations of a stage; schedules above it are marked (unit of the
            costs).
    """
    rows = [["schedule", "chunks", "step", "bubble", "waits", "in flight", "activations"]]
    is_any_above = False
    for outcome in comparison.outcomes:
        timeline = outcome.timeline
        is_above = limit is not None and not outcome.fits(limit)
        is_any_above = is_any_above or is_above
        rows.append(
            [
                outcome.label,
                outcome.chunks,
                str(timeline.length),
                f"{timeline.bubble:.1%}",
                str(max(timeline.waits())),
                str(max(outcome.live)),
                f"{max(outcome.peaks):.4g}{'*' if is_above else ''}",
            ]
        )
    lines = [f"pp {sizes.num_stages}, {_microbatches(sizes.num_microbatches)}; {source}", ""]
    lines += [align_columns(rows), ""] if comparison.outcomes else []
    if is_any_above:
        lines.append(f"* more than the limit of {limit:g}")
    lines += ["waits, in flight, activations: of the rank with most", IN_FLIGHT]
    if comparison.refusals:
        lines += ["", "cannot run at these sizes:"]
    for name, reason in comparison.refusals.items():
        lines += textwrap.wrap(
            f"{name}: {reason}", 100, initial_indent="  ", subsequent_indent="    "
        )
    return "\n".join(lines)


def _microbatches(number: int) -> str:
    return f"{number} {'microbatch' if number == 1 else 'microbatches'}"


def _alternatives(outcome: ScheduleOutcome) -> list[str]:
    if not outcome.alternatives:
        return []
    alternatives = [
        f"{alternative.schedule.name} {alternative.length} ticks"
        + ("" if alternative.fits else f" (keeps too much: {alternative.peak:.4g})")
        for alternative in outcome.alternatives
    ]
    return [f"beside it: {', '.join(alternatives)}"]
