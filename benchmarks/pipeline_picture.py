"""Picture of a schedule's simulated timeline above the recorded one.

    python -m benchmarks.pipeline --layout pp2 --schedules auto:2 zb-v:2 --warmup 6
    python -m benchmarks.pipeline_picture --costs runs/pipeline/llama8b_half_pp2_auto_2.json \\
        --recorded runs/pipeline/llama8b_half_pp2_zb-v_2.json --name zb-v --png timeline.png

The simulation uses the stage times that ``schedule="auto"`` has measured. The recorded timeline
shows one step, from the first forward pass of the first stage.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.step_callbacks import measured_costs
from lightning_megatron.cli.draw_schedule import draw_schedules
from lightning_megatron.cli.schedule_outcome import simulated
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.schedule import Schedule, build_schedule
from lightning_megatron.plan.simulate import Span, Timeline


def recorded_timeline(schedule: Schedule, rows: list[list[list[Any]]]) -> Timeline:
    """Return a timeline of recorded actions, which must be those of the schedule.

    Args:
        schedule: Schedule that ran.
        rows: Actions of every stage as kind, chunk, microbatch, start and end (microseconds).

    Raises:
        ValueError: If a stage ran other actions, or in another order.
    """
    begin = min(start for row in rows for *_, start, _ in row)
    spans = []
    actions = []
    for stage, row in enumerate(rows):
        spans_of_stage = [
            Span(stage, Action(kind, chunk, microbatch), start - begin, stop - begin)
            for kind, chunk, microbatch, start, stop in row
        ]
        spans.append(tuple(spans_of_stage))
        actions.append(tuple(span.action for span in spans_of_stage))
    if tuple(actions) != schedule.rows:
        raise ValueError(
            f"the recorded actions must be those of schedule {schedule.name!r}: they are of "
            "another schedule, or of other sizes. Use the --name that was recorded."
        )
    return Timeline(schedule, tuple(spans))


def main() -> None:
    """Draw both timelines into one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", required=True, help="measurements of an auto case")
    parser.add_argument("--recorded", required=True, help="measurements of the drawn case")
    parser.add_argument("--name", required=True, help="schedule of the drawn case")
    parser.add_argument("--png", required=True, help="file to write")
    args = parser.parse_args()
    costs = measured_costs(json.loads(Path(args.costs).read_text()))
    rows = json.loads(Path(args.recorded).read_text())["StageTimes"]["rows"]
    num_stages = len(rows)
    num_chunks = costs.times.num_virtual_stages // num_stages
    num_microbatches = 1 + max(microbatch for row in rows for _, _, microbatch, *_ in row)
    schedule = build_schedule(args.name, num_stages, num_microbatches, num_chunks)
    costs = replace(costs, kept=tuple(size / 2**30 for size in costs.kept))
    simulation = simulated(schedule, costs, f"{args.name} simulated")
    timeline = recorded_timeline(schedule, rows)
    outcomes = [simulation, replace(simulation, label=f"{args.name} recorded", timeline=timeline)]
    title = f"{args.name}, {num_stages} stages, {num_microbatches} microbatches (microseconds, GiB)"
    draw_schedules(
        outcomes, args.png, title, "Simulated and recorded timeline of one training step"
    )


if __name__ == "__main__":
    main()
