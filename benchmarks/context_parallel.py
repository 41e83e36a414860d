"""Benchmark of long rows, packed or not, under context parallelism, and of another program.

    python -m benchmarks.context_parallel --cases 1 4 4:ring --lengths 4096 32768 131072
    python -m benchmarks.context_parallel --cases 1 --rows whole packed mask
    python -m benchmarks.context_parallel --cases 1 4:ring --row-steps 6 --peer PROGRAM
    python -m benchmarks.context_parallel --cases 4:all_to_all --lengths 524288 --rows whole \\
        --steps 1 --warmup 1 --profile-steps 1 --timeout 420 \\
        --options '{"loss_chunk": "forward", "recompute": "full_except_core"}'

``cp:transport`` names a case, which runs on cp GPUs. ``benchmarks/train_shapes.py`` defines
training, timing and rows, and ``benchmarks/launch.py`` the peer. ``exposed communication`` is
measured in profiled steps after all other steps. FLOPs count half of the attention matrix (the
causal rule), because a token attends to half of its document on average. Packed rows therefore
count fewer FLOPs than whole rows; compare their tokens per second.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from benchmarks.launch import add_peer, cells, exposed_ms, print_table
from benchmarks.launch import run_ours as run_training
from benchmarks.launch import run_peer as run_other
from benchmarks.measure import option_parser
from benchmarks.shapes import LAYOUTS, ROWS, SHAPES, changed, document_lengths, seen_length
from benchmarks.train_shapes import add_training, training_line
from lightning_megatron.plan.context_transport import ContextTransport


@dataclass(frozen=True)
class ContextCase:
    """Number of ranks that share a row, and their transport."""

    cp: int
    transport: str = "auto"

    def __str__(self) -> str:
        return str(self.cp) if self.transport == "auto" else f"{self.cp} {self.transport}"


def case_of(text: str) -> ContextCase:
    """Return the case that ``cp`` or ``cp:transport`` names.

    Raises:
        ArgumentTypeError: If the number of ranks or the transport is unknown.
    """
    cp, _, transport = text.partition(":")
    transports = ("auto", *get_args(ContextTransport))
    if f"cp{cp}" not in LAYOUTS or (transport or "auto") not in transports:
        raise ArgumentTypeError(
            f"a case must be 1, 2, 4 or 8 ranks and a transport of {', '.join(transports)}: "
            f"{text!r}. Use 4 or 4:ring."
        )
    return ContextCase(int(cp), transport or "auto")


def run_ours(args: argparse.Namespace, case: ContextCase, length: int, rows: str) -> str:
    """Train a case and return a row of the table; ``length`` is that of a row (tokens)."""
    out = Path(args.out) / f"{args.model}_{case.cp}_{case.transport}_{length}_{rows}.json"
    profile: dict[str, Any] = {}
    if case.cp > 1 and not args.no_profile:
        profile = {"profile": out.with_suffix(""), "device_only": True}
    line = training_line(
        args,
        {"context": {"transport": case.transport}, "microbatch_size": 1},
        layout=f"cp{case.cp}",
        length=length,
        rows=rows,
        batch=1,
        **profile,
    )
    figures = run_training(line, out, case.cp, args.timeout)
    exposed = exposed_ms(figures)
    return f"| ours | {case} | {length} | {rows} | {exposed} | {cells(figures)} |"


def run_peer(args: argparse.Namespace, case: ContextCase, length: int) -> str:
    """Run the peer on whole rows and return a row of the table."""
    line = ["--mbs", "1", "--gbs", "1"]
    line += ["--seq", str(length)] if length != SHAPES[args.model].max_seq_length else []
    line += args.peer_options.split()
    figures = run_other(args, LAYOUTS[f"cp{case.cp}"], line)
    return f"| peer | {case.cp} | {length} | whole | | {cells(figures)} |"


def flop_rule(args: argparse.Namespace) -> list[str]:
    """Return the FLOPs per token for each length, as lines below the table."""
    lines = ["", "GFLOP a token, forward and backward, attention by half:"]
    for length in args.lengths:
        config = changed(args.model, layers=args.layers, length=length, vocabulary=args.vocabulary)
        documents = document_lengths(length)
        whole_gflops, packed_gflops = (
            config.flops_per_token(tokens) / 1e9 for tokens in (length, seen_length(documents))
        )
        lines.append(
            f"- {length} tokens: {whole_gflops:.4g} in whole rows, {packed_gflops:.4g} "
            f"in {len(documents)} documents of {min(documents)} to {max(documents)} tokens"
        )
    return lines


def main() -> None:
    """Run all cases, first those of the peer, and print the table."""
    command_line = option_parser(__doc__)
    add = command_line.add_argument
    add_training(command_line)
    add("--cases", nargs="+", type=case_of, default=[ContextCase(1)])
    add("--lengths", nargs="+", type=int, default=[4096])
    add("--rows", nargs="+", choices=ROWS, default=["whole", "packed"])
    add("--no-profile", action="store_true", help="do not profile steps")
    add_peer(command_line)
    add("--peer-options", default="", help="further arguments of the peer")
    add("--out", default="runs/context_parallel", help="folder of the measurements")
    command_line.set_defaults(steps=6, warmup=3)
    args = command_line.parse_args()
    rows = []
    if args.peer:
        sizes = {case.cp: case for case in args.cases}
        rows += [run_peer(args, *pair) for pair in product(sizes.values(), args.lengths)]
    rows += [run_ours(args, *case) for case in product(args.cases, args.lengths, args.rows)]
    print_table(("program", "cp", "length", "rows", "exposed communication, ms"), rows)
    print("\n".join(flop_rule(args)))


if __name__ == "__main__":
    main()
