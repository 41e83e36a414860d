"""Benchmark of a training step of one shape, with several options, and of another program.

    python -m benchmarks.step --model llama8b_half --layout dp4 --peer PROGRAM
    python -m benchmarks.step --model tiny --layout single --cases eager segments full
    python -m benchmarks.step --model llama8b_half --layout tp2 --cases segments \\
        '{"fp8": "tensorwise", "cuda_graphs": "segments", "linear": {"overlap": true}}'
    python -m benchmarks.step --model qwen3_12 --layout ep2 --forced-balance --peer PROGRAM \\
        --peer-runs "" "--graph transformer_engine --scope attn,moe_router,moe_preprocess"
    python -m benchmarks.step --model qwen3_12 --layout ep2 --batch 8 --steps 12 --workloads

A case is ``eager``, ``segments`` or ``full`` (modes of CUDA graphs) or a JSON object with arguments
of the strategy, on top of ``--options``. Each case is one training by ``benchmarks.train_shapes``,
which explains the other options, and each of ``--peer-runs`` one run of the peer with these further
arguments; ``benchmarks/launch.py`` describes the peer. Communication is exposed where no kernel of
another kind runs (``--profile``). docs/where_time_goes.md gives the expected time of each part of a
step.

With ``--workloads`` the program prints a second table of all workloads of experts, from one
training for each case: in the step with the busiest rank its rows before and after clones, as a
mean over layers and microbatches, and what clones cost (``benchmarks/workload_figures.py``). The
usual cases are then 0, 1 and 2 clones, a limit on rows of 1.1 and 1.25 and none, in every mode of
graphs.
"""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.launch import add_peer, cells, exposed_ms, print_table, run_ours, run_peer
from benchmarks.measure import heading
from benchmarks.shapes import LAYOUTS
from benchmarks.train_shapes import parser, training_line
from benchmarks.workload_figures import COSTS

#: Steps without graphs, and modes of graphs.
MODES = ("eager", "segments", "full")
#: Titles of the table of workloads, before the parts of the cost of clones.
WORKLOAD_COLUMNS = (
    "options",
    "workload",
    "ms a step",
    "longest",
    "rows of a rank",
    "busiest rank",
    "with clones",
    "clones",
    "limit on rows",
)


def case_of(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the strategy of a case.

    Raises:
        ArgumentTypeError: If the text is neither a mode of CUDA graphs nor a JSON object.
    """
    if text in MODES:
        return text, {} if text == "eager" else {"cuda_graphs": text}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(
            f"a case must be a mode or valid JSON: {text!r}: {error}."
        ) from None
    if not isinstance(options, dict):
        raise ArgumentTypeError(
            f"a case must be eager, segments, full or a JSON object, not {text!r}."
        )
    return text, options


def peer_line(args: argparse.Namespace, more: str) -> list[str]:
    """Return the arguments of the peer that a layout and the batch determine."""
    layout = LAYOUTS[args.layout]
    batch = args.batch or layout.batch(args.model)
    line = ["--mbs", str(1 if layout.pp > 1 else batch)]
    if layout.pp > 1:
        line += ["--pp", str(layout.pp), "--gbs", str(batch * layout.data_ranks)]
    line += ["--seq", str(args.length)] if args.length else []
    return [*line, *more.split()]


def row_of(program: str, name: str, figures: dict[str, Any]) -> str:
    """Return a row of the table."""
    graphs = figures.get("GraphFigures") or {}
    captured = f"{graphs['graphs']} in {graphs['capture_seconds']} s" if graphs else ""
    return f"| {program} | {name} | {captured} | {exposed_ms(figures)} | {cells(figures)} |"


def workload_cases() -> list[tuple[str, dict[str, Any]]]:
    """Return the usual cases of workloads: clones, limits on rows, and modes of graphs."""
    return [
        (
            f"{mode}, clones {clones}, rows {rows or 'of the worst routing'}",
            {**case_of(mode)[1], "experts": {"clones": clones, "rows": rows}},
        )
        for mode, clones, rows in product(MODES, (0, 1, 2), (1.1, 1.25, None))
    ]


def workload_rows(name: str, figures: dict[str, Any]) -> list[str]:
    """Return a row of the table of workloads for each workload of a case."""
    rows = []
    for workload, one in (figures.get("WorkloadFigures") or {}).items():
        costs = " | ".join(f"{one[part]:.3f}" for part in COSTS)
        rows.append(
            f"| {name} | {workload} | {one['mean_ms']:.2f} | {one['longest_ms']:.2f} | "
            f"{one['mean']:,.0f} | {one['before']:,.0f} | {one['after']:,.0f} | "
            f"{one['clones']:.1f} | {one['limit'] or ''} | {costs} |"
        )
    return rows


def main() -> None:
    """Run all cases, those of the peer first, and print the table."""
    option_parser = parser()
    option_parser.description = __doc__
    add = option_parser.add_argument
    add("--cases", nargs="+", type=case_of, help="a row for each; otherwise eager")
    add(
        "--peer-runs", nargs="+", default=[""], help="further arguments of the peer, a row for each"
    )
    add("--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS of our trainings")
    add_peer(option_parser)
    option_parser.set_defaults(out="runs/step")
    args = option_parser.parse_args()
    layout = LAYOUTS[args.layout]
    rows = [
        row_of("peer", more, run_peer(args, layout, peer_line(args, more)))
        for more in (args.peer_runs if args.peer else ())
    ]
    workloads: list[str] = []
    usual = workload_cases() if args.workloads else [case_of("eager")]
    for number, (name, options) in enumerate(args.cases or usual):
        out = Path(args.out) / f"{args.model}_{args.layout}_{number}.json"
        line = training_line(args, options)
        figures = run_ours(line, out, layout.devices, args.timeout, args.connections)
        rows.append(row_of("ours", name, figures))
        workloads += workload_rows(name, figures)
    print(f"{args.model}, {args.layout}, {layout.devices} GPUs\n")
    print_table(("program", "options", "graphs, capture", "exposed communication, ms"), rows)
    if workloads:
        print("\n".join(["", *heading(*WORKLOAD_COLUMNS, *COSTS), *workloads]))


if __name__ == "__main__":
    main()
