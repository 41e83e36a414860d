"""Benchmark of the whole Qwen3-30B-A3B on one host: estimated memory first, then measured steps.

    python -m benchmarks.headline --estimate-only
    python -m benchmarks.headline --peer path/to/mcore_peer.py --peer-path PATHS --out runs/headline

The program trains all 48 layers with ep over all GPUs, eight sequences of 4,096 tokens per GPU and
step, and gradient sums and moments in bfloat16. Expert buffers have a limit on their rows, and
ranks have places for clones of experts. By default, the backward pass recomputes no matrix product,
but sends the inputs of experts again. Nothing runs if the estimate exceeds ``--most``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from benchmarks.launch import add_peer, cells, print_table, run_ours, run_peer
from benchmarks.measure import merged, option_parser
from benchmarks.shapes import LAYOUTS, changed
from benchmarks.train_shapes import add_training, training_line
from lightning_megatron.memory.estimate import estimate_memory
from lightning_megatron.plan.budget import GIB, StageMemory, TrainingShape
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.recomputation import Recompute

#: Sequences per GPU and step.
BATCH = 8
#: Goals without recomputation: maximum GiB per GPU, and minimum tokens per second and GPU.
MOST_GIB, LEAST_TOKENS = 105.0, 14_000


def strategy_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the strategy."""
    options: dict[str, Any] = {
        "microbatch_size": args.microbatch_size,
        "recompute": args.recompute,
        "optimizer": {"gradient_dtype": "bfloat16", "moments_dtype": "bfloat16"},
        "experts": {"rows": args.expert_rows or None, "clones": args.clones},
    }
    return merged(options, json.loads(args.options))


def estimate(args: argparse.Namespace) -> StageMemory:
    """Estimate the memory of a GPU."""
    config = changed(args.model, layers=args.layers, vocabulary=args.vocabulary)
    options = strategy_options(args)
    training = TrainingShape(
        seq_length=config.max_seq_length,
        microbatch_size=options["microbatch_size"],
        num_microbatches=BATCH // options["microbatch_size"],
        recompute=options["recompute"],
        expert_transport="one_sided",
        expert_rows=options["experts"]["rows"],
        clone_places=options["experts"]["clones"],
        gradient_bytes=2,
        state_bytes=4,
    )
    layout = ParallelLayout(args.devices, ep=args.devices)
    (memory,) = estimate_memory(config, layout, training)
    return memory


def estimate_line(memory: StageMemory) -> str:
    """Format an estimate as one line."""
    parts = ("static", "activations", "workspace", "communication", "shared")
    sizes = ", ".join(f"{name} {getattr(memory, name) / GIB:.1f}" for name in parts)
    return f"estimate: {memory.peak / GIB:.1f} GiB a GPU ({sizes}); the goal is {MOST_GIB:.0f} GiB"


def case(routing: str, args: argparse.Namespace) -> list[str]:
    """Run a routing with the peer and with this package, and return the rows of the table."""
    layout = LAYOUTS[f"ep{args.devices}"]
    line = training_line(
        args,
        strategy_options(args),
        layout=f"ep{args.devices}",
        batch=BATCH,
        in_a_row=True,
        routing=routing,
        forced_balance=False,
    )
    rows = []
    if args.peer and routing == "balanced":
        figures = run_peer(args, layout, ["--mbs", str(BATCH)])
        rows.append(f"| peer | {routing} | {cells(figures)} |")
    out = Path(args.out) / f"{routing.replace(':', '_')}.json"
    figures = run_ours(line, out, layout.devices, args.timeout)
    return [*rows, f"| ours, all steps in a row | {routing} | {cells(figures)} |"]


def main(arguments: list[str] | None = None) -> None:
    """Estimate, run all routings and print the table."""
    command_line = option_parser(__doc__)
    add_training(command_line)
    devices = [layout.devices for layout in LAYOUTS.values() if layout.ep == layout.devices > 1]
    add = command_line.add_argument
    add("--devices", type=int, default=4, choices=devices)
    add("--routing", nargs="*", default=["balanced", "natural"])
    add("--microbatch-size", type=int, default=1, choices=[1, 2, 4, 8])
    add("--recompute", default="expert_inputs", choices=get_args(Recompute))
    add("--expert-rows", type=float, default=1.25, help="0 sizes buffers for the worst routing")
    add("--clones", type=int, default=1, help="places for clones of experts on each rank")
    add(
        "--most",
        type=float,
        default=135.0,
        help="run nothing if the estimate is above this number of GiB per GPU",
    )
    add("--estimate-only", action="store_true", help="train nothing")
    add_peer(command_line)
    add("--out", default="runs/headline", help="folder of the figures")
    command_line.set_defaults(timeout=500.0, model="qwen3_48", forced_balance=True)
    args = command_line.parse_args(arguments)
    memory = estimate(args)
    print(estimate_line(memory), flush=True)
    if args.estimate_only:
        return
    if memory.peak > args.most * GIB:
        raise SystemExit(f"The estimate exceeds --most ({args.most:g} GiB): nothing was run.")
    print_table(("program", "routing"), [row for name in args.routing for row in case(name, args)])
    print(estimate_line(memory))
    print(f"goal: {LEAST_TOKENS:,} tokens/s/GPU within {MOST_GIB:.0f} GiB")


if __name__ == "__main__":
    main()
