"""Benchmark of pipeline schedules, compared with those of another program on the same machine.

    python -m benchmarks.pipeline --layout pp2 --schedules 1f1b interleaved:2 zb-h1 zb-v:2
    python -m benchmarks.pipeline --layout pp4 --schedules zb-v:2 --peer PROGRAM --peer-chunks 1 2

``name:chunks`` names a schedule and its chunks per stage. Each row trains the same model on the
same tokens, in microbatches of one sequence. ``benchmarks/train_shapes.py`` defines training and
timing, and ``benchmarks/launch.py`` the peer. The ``auto`` cases run first, and the stage times
that they measure determine the simulated times of the other cases.
"""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import add_peer, cells, print_table
from benchmarks.launch import run_ours as run_training
from benchmarks.launch import run_peer as run_other
from benchmarks.measure import option_parser
from benchmarks.shapes import LAYOUTS
from benchmarks.step_callbacks import measured_costs
from benchmarks.train_shapes import add_training, training_line
from lightning_megatron.plan.schedule import build_schedule
from lightning_megatron.plan.simulate import simulate


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule and its chunks per stage."""

    name: str
    chunks: int = 1

    def __str__(self) -> str:
        return self.name if self.chunks == 1 else f"{self.name} vpp{self.chunks}"


def schedule_of(text: str) -> ScheduleCase:
    """Return the case that ``name`` or ``name:chunks`` names.

    Raises:
        ArgumentTypeError: If the number of chunks is not a positive integer.
    """
    name, _, chunks = text.partition(":")
    if chunks and not (chunks.isdecimal() and int(chunks) > 0):
        raise ArgumentTypeError(
            f"the chunks of a schedule must be a positive integer: {text!r}. Use zb-v:2."
        )
    return ScheduleCase(name, int(chunks or 1))


def run_ours(args: argparse.Namespace, case: ScheduleCase) -> str:
    """Train with one schedule and return a row of the table."""
    out = Path(args.out) / f"{args.model}_{args.layout}_{case.name}_{case.chunks}.json"
    line = training_line(
        args,
        {"schedule": case.name, "vpp": case.chunks},
        batch=args.microbatches,
        time_actions=True,
        time_optimizer=True,
    )
    figures = run_training(line, out, LAYOUTS[args.layout].devices, args.timeout)
    return f"| ours | {case} | {simulated(args, case)} | {cells(figures)} |"


def simulated(args: argparse.Namespace, case: ScheduleCase) -> str:
    """Return a schedule's simulated time and bubble, from the stage times that ``auto`` measured.

    The simulated time includes the measured time of clipping and the optimizer. The cells are empty
    for ``auto`` itself, and if no ``auto`` case with the same number of chunks has run before.
    """
    measured = Path(args.out) / f"{args.model}_{args.layout}_auto_{case.chunks}.json"
    if case.name == "auto" or not measured.exists():
        return " | "
    figures = json.loads(measured.read_text())
    schedule = build_schedule(case.name, LAYOUTS[args.layout].pp, args.microbatches, case.chunks)
    timeline = simulate(schedule, measured_costs(figures).times)
    step = timeline.length / 1e3 + figures["OptimizerTime"].get("optimizer_ms", 0.0)
    return f"{step:.1f} | {timeline.bubble:.1%}"


def run_peer(args: argparse.Namespace, chunks: int) -> str:
    """Run the peer with a number of chunks per stage and return a row of the table."""
    layout = LAYOUTS[args.layout]
    line = ["--pp", str(layout.pp), "--mbs", "1"]
    line += ["--gbs", str(args.microbatches * layout.data_ranks)]
    line += ["--vp", str(chunks)] if chunks > 1 else []
    name = "1f1b" if chunks == 1 else f"interleaved vpp{chunks}"
    return f"| peer | {name} | | | {cells(run_other(args, layout, line))} |"


def main() -> None:
    """Run all cases, the peer's first, and print the table."""
    command_line = option_parser(__doc__)
    layouts = [name for name, layout in LAYOUTS.items() if layout.pp > 1]
    add = command_line.add_argument
    add_training(command_line)
    add("--layout", default="pp2", choices=layouts)
    add("--schedules", nargs="*", type=schedule_of, default=[ScheduleCase("1f1b")])
    add("--microbatches", type=int, default=8, help="microbatches of a step")
    add_peer(command_line)
    add("--peer-chunks", nargs="*", type=int, default=[1], help="chunks per stage of the peer")
    add("--out", default="runs/pipeline", help="folder of the measurements")
    args = command_line.parse_args()
    rows = [run_peer(args, chunks) for chunks in args.peer_chunks] if args.peer else []
    cases = sorted(args.schedules, key=lambda case: case.name != "auto")
    rows += [run_ours(args, case) for case in cases]
    print(f"{args.model}, {args.layout}, {args.microbatches} microbatches a step\n")
    print_table(("program", "schedule", "simulated ms", "bubble"), rows)


if __name__ == "__main__":
    main()
