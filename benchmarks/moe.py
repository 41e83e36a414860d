r"""Benchmark of training steps with mixtures of experts, compared with another program.

    python -m benchmarks.moe --devices 4 --peer path/to/mcore_peer.py --out runs/moe
    python -m benchmarks.moe --devices 2 --shapes qwen3_30b_s --routing balanced
    python -m benchmarks.moe --shapes qwen3_12 --routing natural zipf:1.0:random zipf:0.6:ordered \
        --clones 0 1 2 --expert-rows 1.25

The program trains each shape with every routing and every number of places for clones of busy
experts. Tokens go to experts in turn (balanced), by the untrained router (natural), or to experts
drawn by popularity (see ``benchmarks/routing.py``). ``benchmarks/shapes.py`` defines shapes,
``benchmarks/train_shapes.py`` timing, and ``benchmarks/data_parallel.py`` the interface of the
peer. The FLOPs of a token include only its selected experts.

With several ranks, a second table shows the rows of the busiest rank over the mean, before and
after clones take over rows, and the time that clones save per step, measured and predicted. The
prediction is the time of the rows that the busiest rank saves minus the time of the transfers of
clones, without overlap. With ``--profile``, a third table shows the parts of a step. Its last
columns are the times of some kernels: barriers between ranks, placement of clones, puts of weights
and reads of gradients.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.data_parallel import TABLE, run_ours, run_peer
from benchmarks.routing import popularity_of
from benchmarks.step_profile import CLONE_PARTS
from benchmarks.train_shapes import parser

SHAPES = ("qwen3_30b_s", "mixtral_s", "tiny_moe")
ROUTINGS = ("balanced", "natural")
#: Columns of the table of ranks.
RANK_TABLE = [
    (
        "| shape, routing | clones a rank | ms a step | max/mean rows before | after | moved "
        "| clones in use | most rows | gain ms | predicted ms |"
    ),
    "|---|---|---|---|---|---|---|---|---|---|",
]
#: Classes of kernels in each column of the table of parts.
PARTS = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "router": ("router",),
    "permutes": ("permutes",),
    "other kernels": ("elementwise and reductions", "copy and fill"),
    "optimizer": ("optimizer",),
    "communication": ("communication",),
}


def strategy_options(clones: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the strategy for a number of places for clones."""
    arguments: dict[str, Any] = json.loads(options.options)
    arguments |= {"expert_clones": clones} if clones else {}
    return arguments | ({"expert_rows": options.expert_rows} if options.expert_rows else {})


def case(shape: str, routing: str, clones: int, options: argparse.Namespace) -> list[str]:
    """Run one shape with the peer and with this package, and return the rows of the table."""
    out = figures_of(shape, routing, clones, options)
    layout = "single" if options.devices == 1 else f"ep{options.devices}"
    line = ["--model", shape, "--layout", layout, "--steps", str(options.steps), "--out", str(out)]
    line += ["--profile", str(out.with_suffix(".trace.json.gz"))] if options.profile else []
    line += ["--forced-balance"] if routing == "balanced" else ["--routing", routing]
    line += ["--in-a-row"] if options.in_a_row else []
    line += ["--accelerator", options.accelerator]
    line += ["--options", json.dumps(strategy_options(clones, options))]
    args = argparse.Namespace(**vars(parser().parse_args(line)))
    args.peer = options.peer
    args.peer_path = options.peer_path
    args.timeout = options.timeout
    args.connections = options.connections
    # The peer supports neither clones nor routings by popularity.
    rows = run_peer(args) if options.peer and not clones and routing in ROUTINGS else []
    rows += run_ours(args, line) if not options.only_peer else []
    name = f"{shape}, {routing}" + (f", {clones} clones" if clones else "")
    return [row.replace(f"| {shape} |", f"| {name} |") for row in rows]


def figures_of(shape: str, routing: str, clones: int, options: argparse.Namespace) -> Path:
    """Return the file of a case's measurements."""
    name = f"{shape}_{routing}".replace(":", "_") + (f"_clones{clones}" if clones else "")
    return Path(options.out) / f"{name}.json"


def rank_rows(shape: str, routing: str, options: argparse.Namespace) -> list[str]:
    """Return the rows of the table of ranks, one for each measured number of clones."""
    rows: list[str] = []
    plain_ms: float | None = None
    for clones in options.clones:
        path = figures_of(shape, routing, clones, options)
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        ranks = figures.get("RankLoad")
        if not ranks:
            continue
        step_ms = figures["step_ms"]
        plain_ms = step_ms if clones == 0 else plain_ms
        gain = "" if plain_ms is None or not clones else f"{plain_ms - step_ms:.2f}"
        cells = (
            f"{shape}, {routing}",
            clones,
            step_ms,
            ranks["max_over_mean"],
            ranks["max_over_mean_after"],
            f"{ranks['moved']:.1%}",
            ranks["clones"],
            f"{ranks['rows_needed']:,}",
            gain,
            ranks["predicted_gain_ms"] if clones else "",
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def breakdown(folder: Path) -> list[str]:
    """Return a table of the parts of steps, with one row for each profile in a folder."""
    names = [*PARTS, "exposed communication", "nothing runs", *CLONE_PARTS]
    lines = ["| shape | step | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for path in sorted(folder.glob("*.json")):
        profile: dict[str, Any] = json.loads(path.read_text()).get("Profile", {})
        if not profile:
            continue
        parts = []
        for kinds in PARTS.values():
            parts.append(sum(profile["kinds_ms"].get(kind, 0.0) for kind in kinds))
        figures = [profile["step_ms"], *parts, profile["exposed_ms"], profile["idle_ms"]]
        figures += [profile["clone_parts_ms"][part] for part in CLONE_PARTS]
        lines.append(f"| {path.stem} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    return lines


def main() -> None:
    """Run all cases and print the tables."""
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument("--devices", type=int, default=4)
    command_line.add_argument("--shapes", nargs="*", default=list(SHAPES))
    command_line.add_argument(
        "--routing",
        nargs="*",
        default=list(ROUTINGS),
        help="balanced, natural, zipf:EXPONENT:random or zipf:EXPONENT:ordered",
    )
    command_line.add_argument(
        "--clones",
        nargs="*",
        type=int,
        default=[0],
        help="places of a rank for clones of busy experts",
    )
    command_line.add_argument(
        "--expert-rows", type=float, help="rows of a rank's buffers over the even share"
    )
    command_line.add_argument("--steps", type=int, default=8, help="steps that count")
    command_line.add_argument("--peer", default="", help="program to compare with")
    command_line.add_argument(
        "--peer-path", default="", help="folders that only the peer imports from"
    )
    command_line.add_argument("--only-peer", action="store_true", help="run only the peer")
    command_line.add_argument(
        "--in-a-row", action="store_true", help="ours: do not wait for the device between the steps"
    )
    command_line.add_argument(
        "--profile", action="store_true", help="also print the parts of our steps"
    )
    command_line.add_argument(
        "--options", default="{}", help="further arguments of the strategy, as JSON"
    )
    command_line.add_argument(
        "--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS for ours"
    )
    command_line.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    command_line.add_argument(
        "--timeout", type=float, default=120.0, help="seconds for each program"
    )
    command_line.add_argument("--out", default="runs/moe", help="folder for figures and profiles")
    args = command_line.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name in args.routing:
        popularity_of(name)
    pairs = [(shape, routing) for shape in args.shapes for routing in args.routing]
    rows = [row for pair in pairs for clones in args.clones for row in case(*pair, clones, args)]
    text = "\n".join([*TABLE, *rows])
    ranks = [row for pair in pairs for row in rank_rows(*pair, args)]
    if ranks:
        text += "\n\nRows of ranks in the last step:\n\n" + "\n".join([*RANK_TABLE, *ranks])
    if args.profile:
        text += "\n\nms of a step under the profiler:\n\n" + "\n".join(breakdown(Path(args.out)))
    print(text, flush=True)
    (Path(args.out) / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
