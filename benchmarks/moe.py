"""Benchmark of training steps with mixtures of experts, compared with another program.

    python -m benchmarks.moe --devices 4 --peer path/to/mcore_peer.py --out runs/moe
    python -m benchmarks.moe --devices 2 --shapes qwen3_30b_s --kinds balanced

Each shape is trained with round-robin routing (balanced) and with the routing of its untrained
router (natural). ``benchmarks/train_shapes.py`` defines shapes and timing, and
``benchmarks/data_parallel.py`` the interface of the peer. The FLOPs of a token include only its
selected experts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.data_parallel import TABLE, run_ours, run_peer
from benchmarks.train_shapes import parser

SHAPES = ("qwen3_30b_s", "mixtral_s", "tiny_moe")
KINDS = ("balanced", "natural")
#: Classes of kernels in each column of the table.
PARTS = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "router": ("router",),
    "permutes": ("permutes",),
    "other kernels": ("elementwise and reductions", "copy and fill"),
    "optimizer": ("optimizer",),
    "communication": ("communication",),
}


def case(shape: str, kind: str, options: argparse.Namespace) -> list[str]:
    """Run one shape with the peer and with our program, and return the rows of the table."""
    out = Path(options.out) / f"{shape}_{kind}.json"
    layout = "single" if options.devices == 1 else f"ep{options.devices}"
    line = ["--model", shape, "--layout", layout, "--steps", str(options.steps), "--out", str(out)]
    line += ["--profile", str(out.with_suffix(".trace.json.gz"))] if options.profile else []
    line += ["--forced-balance"] if kind == "balanced" else []
    line += ["--in-a-row"] if options.in_a_row else []
    line += ["--accelerator", options.accelerator, "--options", options.options]
    args = argparse.Namespace(**vars(parser().parse_args(line)))
    args.peer = options.peer
    args.peer_path = options.peer_path
    args.timeout = options.timeout
    args.connections = options.connections
    rows = run_peer(args) if options.peer else []
    rows += run_ours(args, line) if not options.only_peer else []
    return [row.replace(f"| {shape} |", f"| {shape}, {kind} |") for row in rows]


def breakdown(folder: Path) -> list[str]:
    """Return a table of the parts of our steps, with one row for each profile in a folder."""
    lines = ["| shape | step | " + " | ".join(PARTS) + " | exposed communication | nothing runs |"]
    lines.append("|---" * (len(PARTS) + 4) + "|")
    for path in sorted(folder.glob("*.json")):
        found: dict[str, Any] = json.loads(path.read_text()).get("Profile", {})
        if not found:
            continue
        parts = [
            sum(found["kinds_ms"].get(kind, 0.0) for kind in kinds) for kinds in PARTS.values()
        ]
        figures = [found["step_ms"], *parts, found["exposed_ms"], found["idle_ms"]]
        lines.append(f"| {path.stem} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    return lines


def main() -> None:
    """Run all cases and print the tables."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--devices", type=int, default=4, choices=[1, 2, 4])
    options.add_argument("--shapes", nargs="*", default=list(SHAPES))
    options.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    options.add_argument("--steps", type=int, default=8, help="steps that count")
    options.add_argument("--peer", default="", help="program to compare with")
    options.add_argument("--peer-path", default="", help="folders for its imports alone")
    options.add_argument("--only-peer", action="store_true", help="run only the peer")
    options.add_argument(
        "--in-a-row", action="store_true", help="ours: do not wait for the device between the steps"
    )
    options.add_argument("--profile", action="store_true", help="also print the parts of our steps")
    options.add_argument(
        "--options", default="{}", help="further arguments of the strategy, as JSON"
    )
    options.add_argument(
        "--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS for ours"
    )
    options.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--timeout", type=float, default=120.0, help="seconds for each program")
    options.add_argument("--out", default="runs/moe", help="folder for figures and profiles")
    args = options.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    rows = [row for shape in args.shapes for kind in args.kinds for row in case(shape, kind, args)]
    text = "\n".join([*TABLE, *rows])
    if args.profile:
        text += "\n\nms of a step under the profiler:\n\n" + "\n".join(breakdown(Path(args.out)))
    print(text, flush=True)
    (Path(args.out) / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
