"""Benchmark of pipeline schedules, compared with those of another program on the same machine.

    python -m benchmarks.pipeline --layout pp2 --schedules 1f1b interleaved:2 zb-h1 zb-v:2
    python -m benchmarks.pipeline --layout pp4 --schedules zb-v:2 --peer PROGRAM --peer-chunks 1 2

``name:chunks`` names a schedule and its chunks per stage. Each row trains the same model on the
same tokens, in microbatches of one sequence. ``benchmarks/train_shapes.py`` defines training and
timing. The peer is a program as in ``benchmarks/data_parallel.py`` that also takes
``--pp --vp --gbs``. The ``auto`` cases run first, and the stage times that they measure determine
the simulated times of the other cases.
"""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_parallel import launch
from benchmarks.shapes import LAYOUTS, SHAPES
from benchmarks.step_callbacks import measured_costs
from lightning_megatron.plan.schedule import build_schedule
from lightning_megatron.plan.simulate import simulate

TABLE = [
    "| program | layout | schedule | microbatches | ms a step | fastest | tokens/s/GPU "
    "| TFLOP/s/GPU | GiB of the fullest GPU | last loss | simulated ms | bubble |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule and its chunks per stage.

    Args:
        name: Name of the schedule.
        chunks: Chunks per stage (vpp).
    """

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
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    options = {"schedule": case.name, "vpp": case.chunks, **json.loads(args.options)}
    line = ["-m", "benchmarks.train_shapes", "--model", args.model, "--layout", args.layout]
    line += ["--batch", str(args.microbatches), "--steps", str(args.steps)]
    line += ["--warmup", str(args.warmup), "--layers", str(args.layers), "--out", str(out)]
    line += ["--accelerator", args.accelerator, "--options", json.dumps(options)]
    line += ["--time-actions", "--time-optimizer"]
    line += ["--in-a-row"] if args.in_a_row else []
    line += ["--forced-balance"] if args.forced_balance else []
    launch(line, LAYOUTS[args.layout].devices, {}, args.timeout)
    start = f"| ours | {args.layout} | {case} | {args.microbatches}"
    if not out.exists():
        return f"{start} | failed | | | | | | | |"
    figures = json.loads(out.read_text())
    return (
        f"{start} | {figures['step_ms']} | {figures['fastest_ms']} | "
        f"{figures['tokens_per_second_per_rank']:,} | {figures['model_tflops_per_rank']} | "
        f"{figures['peak_gib']} | {figures['losses'][args.warmup + args.steps - 1]:.4f} | "
        f"{simulated(args, case)} |"
    )


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
    line = [args.peer, "--model", args.model, "--tp", str(layout.tp), "--pp", str(layout.pp)]
    line += ["--ep", str(layout.ep), "--mbs", "1"]
    line += ["--gbs", str(args.microbatches * layout.data_ranks)]
    line += ["--vp", str(chunks)] if chunks > 1 else []
    line += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    line += ["--layers", str(args.layers)] if args.layers else []
    line += ["--force-balance"] if args.forced_balance else []
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": args.peer_path}
    output = launch(line, layout.devices, variables, args.timeout)
    name = "1f1b" if chunks == 1 else f"interleaved vpp{chunks}"
    start = f"| peer | {args.layout} | {name} | {args.microbatches}"
    results = [text[7:] for text in output.splitlines() if text.startswith("RESULT ")]
    if not results:
        return f"{start} | failed | | | | | | | |"
    figures = json.loads(results[-1])
    return (
        f"{start} | {figures['ms']} | {figures.get('min_ms', '')} | {figures['tok_s_gpu']:,} | "
        f"{figures['tflops_gpu']} | {figures['mem_gib']} | {figures.get('loss', '')} | | |"
    )


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    layouts = [name for name, layout in LAYOUTS.items() if layout.pp > 1]
    result.add_argument("--model", default="llama8b_half", choices=list(SHAPES))
    result.add_argument("--layout", default="pp2", choices=layouts)
    result.add_argument("--schedules", nargs="*", type=schedule_of, default=[ScheduleCase("1f1b")])
    result.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    result.add_argument("--layers", type=int, default=0, help="number of layers (0: of the shape)")
    result.add_argument("--steps", type=int, default=8, help="measured steps")
    result.add_argument("--warmup", type=int, default=4, help="steps before the measured steps")
    result.add_argument("--peer", default="", help="program to compare with")
    result.add_argument("--peer-path", default="", help="folders that only the peer imports from")
    result.add_argument(
        "--peer-chunks", nargs="*", type=int, default=[1], help="chunks per stage of the peer"
    )
    result.add_argument("--in-a-row", action="store_true", help="ours: do not wait between steps")
    result.add_argument("--forced-balance", action="store_true", help="route tokens in turn")
    result.add_argument("--options", default="{}", help="more arguments of the strategy, as JSON")
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument("--timeout", type=float, default=240.0, help="seconds for each program")
    result.add_argument("--out", default="runs/pipeline", help="folder of the measurements")
    return result


def main() -> None:
    """Run all cases, the peer's first, and print the table."""
    args = parser().parse_args()
    rows = [run_peer(args, chunks) for chunks in args.peer_chunks] if args.peer else []
    cases = sorted(args.schedules, key=lambda case: case.name != "auto")
    rows += [run_ours(args, case) for case in cases]
    print("\n".join(TABLE + rows))


if __name__ == "__main__":
    main()
