"""Benchmark of a training step of one shape, with several options, and of another program.

    python -m benchmarks.step --model llama8b_half --layout dp4 --peer PROGRAM
    python -m benchmarks.step --model tiny --layout single --cases eager segments full
    python -m benchmarks.step --model llama8b_half --layout tp2 --cases segments \\
        '{"fp8": "tensorwise", "cuda_graphs": "segments", "linear": {"overlap": true}}'
    python -m benchmarks.step --model qwen3_12 --layout ep2 --forced-balance --peer PROGRAM \\
        --peer-runs "" "--graph transformer_engine --scope attn,moe_router,moe_preprocess"

A case is ``eager``, ``segments`` or ``full`` (modes of CUDA graphs) or a JSON object with arguments
of the strategy, on top of ``--options``. Each case is one training by ``benchmarks.train_shapes``,
which explains the other options, and each of ``--peer-runs`` one run of the peer with these further
arguments; ``benchmarks/launch.py`` describes the peer. Communication is exposed where no kernel of
another kind runs (``--profile``). docs/where_time_goes.md gives the expected time of each part of a
step.
"""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from benchmarks.launch import add_peer, cells, exposed_ms, print_table, run_ours, run_peer
from benchmarks.shapes import LAYOUTS
from benchmarks.train_shapes import parser, training_line


def case_of(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the strategy of a case.

    Raises:
        ArgumentTypeError: If the text is neither a mode of CUDA graphs nor a JSON object.
    """
    if text == "eager":
        return text, {}
    if text in ("segments", "full"):
        return text, {"cuda_graphs": text}
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


def main() -> None:
    """Run all cases, those of the peer first, and print the table."""
    option_parser = parser()
    option_parser.description = __doc__
    add = option_parser.add_argument
    add("--cases", nargs="+", type=case_of, default=[case_of("eager")], help="a row for each")
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
    for number, (name, options) in enumerate(args.cases):
        out = Path(args.out) / f"{args.model}_{args.layout}_{number}.json"
        line = training_line(args, options)
        figures = run_ours(line, out, layout.devices, args.timeout, args.connections)
        rows.append(row_of("ours", name, figures))
    print(f"{args.model}, {args.layout}, {layout.devices} GPUs\n")
    print_table(("program", "options", "graphs, capture", "exposed communication, ms"), rows)


if __name__ == "__main__":
    main()
