"""Runs of this package's training and of another program, and the cells of their tables.

The other program is one that torchrun runs with ``--model --tp --mbs --steps --warmup``, and as far
as a case needs them ``--pp --vp --gbs --ep --cp --seq --layers --force-balance``. It prints a line
``RESULT {json}`` with ms, tok_s_gpu, tflops_gpu and mem_gib, and perhaps min_ms, loss and row_ms,
the mean time of a step in a row. Both programs must use the same FLOP rule.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import FLOP_RULE, heading
from benchmarks.shapes import Layout
from lightning_megatron.strategy.profiling.step_parts import EXPOSED

#: Titles of the cells that :func:`cells` returns.
COLUMNS = (
    "ms a step",
    "fastest",
    "ms in a row",
    "tokens/s/GPU",
    "TFLOP/s/GPU",
    "GiB a GPU",
    "loss",
)
#: What the programs print below their tables.
RULES = (
    "The host waits for the device after each step (ms a step: median); it does not in the steps "
    "in a row (mean). Tokens/s and TFLOP/s are those of steps in a row where these are measured. "
    f"TFLOP/s: {FLOP_RULE}."
)


def print_table(titles: Sequence[str], rows: Sequence[str]) -> None:
    """Print the table of all runs; ``titles`` precede those of :func:`cells`."""
    print("\n".join([*heading(*titles, *COLUMNS), *rows, "", RULES]), flush=True)


def cells(figures: dict[str, Any]) -> str:
    """Return the cells of a run; ``figures`` are empty if it failed."""
    if not figures:
        return "failed" + " | " * (len(COLUMNS) - 1)
    row_ms = figures.get("row_mean_ms")
    scale = figures["step_ms"] / row_ms if row_ms else 1.0
    flops = figures.get("model_tflops_per_rank", 0.0) * scale
    losses = figures["losses"]
    return (
        f"{figures['step_ms']} | {figures['fastest_ms']} | {row_ms or ''} | "
        f"{figures['tokens_per_second_per_rank'] * scale:,.0f} | {flops:.1f} | "
        f"{figures['peak_gib']} | {f'{losses[-1]:.4f}' if losses else ''}"
    )


def exposed_ms(figures: dict[str, Any]) -> str:
    """Return the exposed communication of a step (ms), as the mean of the stages; "" if unknown."""
    stages = (figures.get("Profile") or {}).get("stages", ())
    return f"{fmean(stage[EXPOSED] for stage in stages):.1f}" if stages else ""


def launch(args: list[str], num_processes: int, variables: dict[str, str], timeout: float) -> str:
    """Run a program under torchrun, print its output and return it."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(num_processes), *args]
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


def run_ours(
    line: Sequence[str], out: Path, devices: int, timeout: float, connections: int = 0
) -> dict[str, Any]:
    """Run ``benchmarks.train_shapes`` and return its figures; empty if it failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)} if connections else {}
    arguments = ["-m", "benchmarks.train_shapes", *line, "--out", str(out)]
    launch(arguments, devices, variables, timeout)
    figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return figures


def run_peer(args: argparse.Namespace, layout: Layout, line: Sequence[str]) -> dict[str, Any]:
    """Run the other program; return its figures by this package's names, empty if it failed."""
    arguments = [args.peer, "--model", args.model, "--tp", str(layout.tp)]
    arguments += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    arguments += ["--ep", str(layout.ep)] if layout.ep > 1 else []
    arguments += ["--cp", str(layout.cp)] if layout.cp > 1 else []
    arguments += ["--layers", str(args.layers)] if args.layers else []
    arguments += ["--force-balance"] if getattr(args, "forced_balance", False) else []
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": args.peer_path}
    output = launch([*arguments, *line], layout.devices, variables, args.timeout)
    results = [text[7:] for text in output.splitlines() if text.startswith("RESULT ")]
    if not results:
        return {}
    figures = json.loads(results[-1])
    return {
        "step_ms": figures["ms"],
        "fastest_ms": figures.get("min_ms", ""),
        "row_mean_ms": figures.get("row_ms"),
        "tokens_per_second_per_rank": figures["tok_s_gpu"],
        "model_tflops_per_rank": figures["tflops_gpu"],
        "peak_gib": figures["mem_gib"],
        "losses": [figures["loss"]] if "loss" in figures else [],
    }


def add_peer(parser: argparse.ArgumentParser) -> None:
    """Add the options of the other program, and of time limits."""
    add = parser.add_argument
    add("--peer", default="", help="program to compare with")
    add("--peer-path", default="", help="folders that only the peer imports from")
    add("--timeout", type=float, default=240.0, help="time limit of each program (seconds)")
