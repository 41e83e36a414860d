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

from benchmarks.launch import ROW_RULE, add_peer, cells, heading
from benchmarks.launch import run_ours as run_training
from benchmarks.launch import run_peer as run_other
from benchmarks.measure import FLOP_RULE
from benchmarks.shapes import LAYOUTS, SHAPES
from benchmarks.step_callbacks import measured_costs
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
    options = {"schedule": case.name, "vpp": case.chunks, **json.loads(args.options)}
    line = ["--model", args.model, "--layout", args.layout, "--batch", str(args.microbatches)]
    line += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    line += ["--row-steps", str(args.row_steps), "--layers", str(args.layers)]
    line += ["--accelerator", args.accelerator, "--options", json.dumps(options)]
    line += ["--time-actions", "--time-optimizer"]
    line += ["--forced-balance"] if args.forced_balance else []
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


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    layouts = [name for name, layout in LAYOUTS.items() if layout.pp > 1]
    add = result.add_argument
    add("--model", default="llama8b_half", choices=list(SHAPES))
    add("--layout", default="pp2", choices=layouts)
    add("--schedules", nargs="*", type=schedule_of, default=[ScheduleCase("1f1b")])
    add("--microbatches", type=int, default=8, help="microbatches of a step")
    add("--layers", type=int, default=0, help="number of layers (0: of the shape)")
    add("--steps", type=int, default=8, help="measured steps")
    add("--warmup", type=int, default=4, help="steps before the measured steps")
    add_peer(result)
    add("--peer-chunks", nargs="*", type=int, default=[1], help="chunks per stage of the peer")
    add("--row-steps", type=int, default=0, help="later steps in a row")
    add("--forced-balance", action="store_true", help="route tokens in turn")
    add("--options", default="{}", help="more arguments of the strategy, as JSON")
    add("--accelerator", default="cuda", choices=["cuda", "cpu"])
    add("--out", default="runs/pipeline", help="folder of the measurements")
    return result


def main() -> None:
    """Run all cases, the peer's first, and print the table."""
    args = parser().parse_args()
    rows = [run_peer(args, chunks) for chunks in args.peer_chunks] if args.peer else []
    cases = sorted(args.schedules, key=lambda case: case.name != "auto")
    rows += [run_ours(args, case) for case in cases]
    lines = [f"{args.model}, {args.layout}, {args.microbatches} microbatches a step", ""]
    lines += [*heading("program", "schedule", "simulated ms", "bubble"), *rows]
    print("\n".join([*lines, "", ROW_RULE, FLOP_RULE]))


if __name__ == "__main__":
    main()
