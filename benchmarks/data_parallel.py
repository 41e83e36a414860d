"""Benchmark of a training step for large shapes, compared with another program on the same machine.

    python -m benchmarks.data_parallel --model llama8b_half --layout dp4 --profile runs/dp4.json.gz
    python -m benchmarks.data_parallel --model gpt2_1_2b --layout single --peer path/to/peer.py

``benchmarks/train_shapes.py`` defines the training and the timing of a step. The peer is a program
that torchrun runs with ``--model --tp --mbs --steps --warmup``. It prints a line ``RESULT {json}``
with ms, tok_s_gpu, tflops_gpu and mem_gib. Both programs use the same tokens, the same FLOP formula
(half of the attention matrix counts) and the same number of measured steps.
docs/where_time_goes.md gives the expected time of each part of a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.shapes import LAYOUTS
from benchmarks.train_shapes import parser

TABLE = [
    (
        "| program | model | layout | ms a step | fastest | tokens/s/GPU | TFLOP/s/GPU | GiB a GPU "
        "| last loss |"
    ),
    "|---|---|---|---|---|---|---|---|---|",
]


def launch(args: list[str], num_processes: int, variables: dict[str, str], timeout: float) -> str:
    """Run a program under torchrun, print its output and return it."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(num_processes),
        *args,
    ]
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(
        folder
        for folder in (variables.pop("PYTHONPATH", ""), root, os.environ.get("PYTHONPATH", ""))
        if folder
    )
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks on SIGTERM.
        process.terminate()
        output, _ = process.communicate()
        output += f"\nstopped after {timeout:.0f} s"
    print(output, flush=True)
    return output


def run_ours(args: Any, extra: list[str]) -> list[str]:
    """Run this package's training and return a row of the table."""
    out = Path(args.out)
    out.unlink(missing_ok=True)
    layout = LAYOUTS[args.layout]
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": str(args.connections)} if args.connections else {}
    launch(["-m", "benchmarks.train_shapes", *extra], layout.devices, variables, args.timeout)
    if not out.exists():
        return [f"| ours | {args.model} | {args.layout} | failed | | | | | |"]
    figures = json.loads(out.read_text())
    return [
        f"| ours | {args.model} | {args.layout} | {figures['step_ms']} | {figures['fastest_ms']} | "
        f"{figures['tokens_per_second_per_rank']:,} | {figures['model_tflops_per_rank']} | "
        f"{figures['peak_gib']} | "
        f"{figures['losses'][args.warmup + args.steps - 1]:.4f} |"
    ]


def run_peer(args: Any) -> list[str]:
    """Run the peer on the same work and return a row of the table."""
    layout = LAYOUTS[args.layout]
    arguments = [
        args.peer,
        "--model",
        args.model,
        "--tp",
        str(layout.tp),
        "--mbs",
        str(args.batch or layout.batch(args.model)),
    ]
    arguments += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    arguments += ["--ep", str(layout.ep)] if layout.ep > 1 else []
    arguments += ["--force-balance"] if args.forced_balance else []
    arguments += ["--layers", str(args.layers)] if args.layers else []
    output = launch(
        arguments,
        layout.devices,
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": args.peer_path},
        args.timeout,
    )
    rows = []
    for figures in (
        json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")
    ):
        rows.append(
            f"| peer | {args.model} | {args.layout} | {figures['ms']} | "
            f"{figures.get('min_ms', '')} | {figures['tok_s_gpu']:,} | {figures['tflops_gpu']} | "
            f"{figures['mem_gib']} | {figures.get('loss', '')} |"
        )
    return rows or [f"| peer | {args.model} | {args.layout} | failed | | | | | |"]


def main() -> None:
    """Run one case with both programs and print the table."""
    option_parser = parser()
    option_parser.description = __doc__
    option_parser.add_argument("--peer", default="", help="program to compare with")
    option_parser.add_argument(
        "--peer-path", default="", help="folders that only the peer imports from"
    )
    option_parser.add_argument("--only", choices=["ours", "peer"], help="run this program only")
    option_parser.add_argument(
        "--connections",
        type=int,
        default=0,
        help="CUDA_DEVICE_MAX_CONNECTIONS of this package's training",
    )
    option_parser.add_argument(
        "--timeout", type=float, default=240.0, help="time limit of each program (seconds)"
    )
    option_parser.add_argument("--table", default="", help="append the rows to this file")
    args = option_parser.parse_args()
    comparison_options = (
        vars(option_parser.parse_args([])).keys() - vars(parser().parse_args([])).keys()
    )
    extra: list[str] = []
    for name, value in vars(args).items():
        if name in comparison_options or value in ("", False, None):
            continue
        flag = "--" + name.replace("_", "-")
        extra += [flag] if value is True else [flag, str(value)]
    rows = []
    if args.peer and args.only != "ours":
        rows += run_peer(args)
    if args.only != "peer":
        rows += run_ours(args, extra)
    print("\n".join([*TABLE, *rows]), flush=True)
    if args.table:
        path = Path(args.table)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("\n".join(rows if path.stat().st_size else [*TABLE, *rows]) + "\n")


if __name__ == "__main__":
    main()
