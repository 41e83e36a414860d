"""Benchmark of long rows, packed or not, under context parallelism, and of another program.

    python -m benchmarks.context_parallel --cases 1 4 4:ring --lengths 4096 32768 131072
    python -m benchmarks.context_parallel --cases 1 --rows whole packed mask transformers \\
        --attention torch_flash sdpa
    python -m benchmarks.context_parallel --cases 1 4:ring --row-steps 6 --peer PROGRAM
    python -m benchmarks.context_parallel --cases 4:all_to_all --lengths 524288 --rows whole \\
        --steps 1 --warmup 1 --profile-steps 1 --timeout 420 \\
        --options '{"loss_chunk": "forward", "recompute": "full_except_core"}'

``cp:transport`` names a case, which runs on cp GPUs. The peer is a program as in
``benchmarks/data_parallel.py`` that also takes ``--cp``, and ``--seq`` for lengths that differ from
that of the shape. ``ms in a row`` is the time of a step among ``--row-steps`` steps between which
the host does not wait for the device. ``transformers`` is Hugging Face's model on the packed rows;
the name of its attention follows in parentheses. ``exposed communication`` is measured in profiled
steps after all other steps. FLOPs count half of the attention matrix (the causal rule), because a
token attends to half of its document on average. Packed rows therefore count fewer FLOPs than whole
rows; compare their tokens per second.
"""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from benchmarks.context_steps import ROWS, document_lengths, seen_length, shape_of
from benchmarks.data_parallel import launch
from benchmarks.measure import flops_per_token
from benchmarks.packed_attention import ATTENTIONS
from benchmarks.shapes import SHAPES
from lightning_megatron.plan.context_transport import ContextTransport

TABLE = [
    "| program | cp | length | rows | ms a step | fastest | ms in a row | tokens/s/GPU "
    "| TFLOP/s/GPU | GiB of the fullest GPU | exposed communication, ms | last loss |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class ContextCase:
    """Number of ranks that share a row, and their transport.

    Args:
        cp: Context-parallel size (GPUs).
        transport: Transport of keys and values over these ranks.
    """

    cp: int
    transport: str = "auto"

    def __str__(self) -> str:
        return str(self.cp) if self.transport == "auto" else f"{self.cp} {self.transport}"


def case_of(text: str) -> ContextCase:
    """Return the case that ``cp`` or ``cp:transport`` names.

    Raises:
        ArgumentTypeError: If cp is not a positive integer, or the transport is unknown.
    """
    cp, _, transport = text.partition(":")
    transports = ("auto", *get_args(ContextTransport))
    if not (cp.isdecimal() and int(cp) > 0) or (transport or "auto") not in transports:
        raise ArgumentTypeError(
            f"a case must be a number of ranks and a transport of {', '.join(transports)}: "
            f"{text!r}. Use 4 or 4:ring."
        )
    return ContextCase(int(cp), transport or "auto")


def run_ours(
    args: argparse.Namespace, case: ContextCase, length: int, rows: str, attention: str = "auto"
) -> str:
    """Train a case and return a row of the table.

    Args:
        args: Options of the benchmark.
        case: Ranks and transport.
        length: Length of a row (tokens).
        rows: Kind of rows.
        attention: Attention of transformers; no effect on other kinds of rows.
    """
    suffix = "" if attention == "auto" else f"_{attention}"
    name = f"{args.model}_{case.cp}_{case.transport}_{length}_{rows}{suffix}.json"
    out = Path(args.out) / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    arguments = ["-m", "benchmarks.context_steps", "--model", args.model, "--cp", str(case.cp)]
    arguments += ["--transport", case.transport, "--length", str(length), "--rows", rows]
    arguments += ["--layers", str(args.layers), "--vocabulary", str(args.vocabulary)]
    arguments += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--out", str(out)]
    arguments += ["--accelerator", args.accelerator, "--options", args.options]
    arguments += ["--row-steps", str(args.row_steps), "--attention", attention]
    if case.cp > 1 and not args.no_profile:
        arguments += ["--profile", "--profile-steps", str(args.profile_steps)]
    launch(arguments, case.cp, {}, args.timeout)
    figures = json.loads(out.read_text()) if out.exists() else {}
    program = "ours"
    if rows == "transformers":
        program = f"transformers ({figures.get('attention', attention)})"
    start = f"| {program} | {case} | {length} | {rows}"
    if not figures:
        return f"{start} | failed | | | | | | | |"
    profile = figures.get("profile") or {}
    # A trace without kernels contains no communication.
    exposed = f"{profile['exposed_ms']:.1f}" if profile.get("kernels") else ""
    return (
        f"{start} | {figures['step_ms']} | {figures['fastest_ms']} | "
        f"{figures.get('row_ms', '')} | "
        f"{figures['tokens_per_second_per_rank']:,} | {figures['model_tflops_per_rank']} | "
        f"{figures['peak_gib']} | {exposed} | "
        f"{figures['losses'][args.warmup + args.steps - 1]:.4f} |"
    )


def run_peer(args: argparse.Namespace, case: ContextCase, length: int) -> str:
    """Run the peer on whole rows and return a row of the table."""
    arguments = [args.peer, "--model", args.model, "--cp", str(case.cp), "--mbs", "1", "--gbs", "1"]
    arguments += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    arguments += ["--layers", str(args.layers)] if args.layers else []
    arguments += ["--seq", str(length)] if length != SHAPES[args.model].max_seq_length else []
    arguments += args.peer_options.split()
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": args.peer_path}
    output = launch(arguments, case.cp, variables, args.timeout)
    start = f"| peer | {case.cp} | {length} | whole"
    results = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
    if not results:
        return f"{start} | failed | | | | | | | |"
    figures = json.loads(results[-1])
    return (
        f"{start} | {figures['ms']} | {figures.get('min_ms', '')} | "
        f"{figures.get('row_ms', '')} | {figures['tok_s_gpu']:,} | "
        f"{figures['tflops_gpu']} | {figures['mem_gib']} | | {figures.get('loss', '')} |"
    )


def flop_rule(args: argparse.Namespace) -> list[str]:
    """Return the FLOPs per token for each length, as lines below the table."""
    lines = ["", "GFLOP a token, forward and backward, attention by half:"]
    for length in args.lengths:
        config = shape_of(argparse.Namespace(**{**vars(args), "length": length}))
        documents = document_lengths(length)
        whole_gflops, packed_gflops = (
            flops_per_token(config, tokens) / 1e9 for tokens in (length, seen_length(documents))
        )
        lines.append(
            f"- {length} tokens: {whole_gflops:.4g} in whole rows, {packed_gflops:.4g} "
            f"in {len(documents)} documents of {min(documents)} to {max(documents)} tokens"
        )
    return lines


def parser() -> argparse.ArgumentParser:
    """Build the parser of the options."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="llama8b_half", choices=list(SHAPES))
    result.add_argument("--cases", nargs="+", type=case_of, default=[ContextCase(1)])
    result.add_argument("--lengths", nargs="+", type=int, default=[4096])
    result.add_argument("--rows", nargs="+", choices=ROWS, default=["whole", "packed"])
    result.add_argument(
        "--attention",
        nargs="+",
        default=["auto"],
        choices=["auto", *ATTENTIONS],
        help="attentions of transformers, a row for each (auto: flash attention on a GPU)",
    )
    result.add_argument(
        "--layers", type=int, default=0, help="number of layers (0: as in the shape)"
    )
    result.add_argument(
        "--vocabulary", type=int, default=0, help="size of the vocabulary (0: as in the shape)"
    )
    result.add_argument("--steps", type=int, default=6, help="measured steps")
    result.add_argument("--warmup", type=int, default=3, help="steps before the measured steps")
    result.add_argument("--row-steps", type=int, default=0, help="later steps in a row")
    result.add_argument(
        "--profile-steps", type=int, default=3, help="profiled steps (1 suits steps of seconds)"
    )
    result.add_argument("--no-profile", action="store_true", help="do not profile steps")
    result.add_argument("--peer", default="", help="program to compare with")
    result.add_argument("--peer-path", default="", help="folders that only the peer imports from")
    result.add_argument("--peer-options", default="", help="further arguments of the peer")
    result.add_argument(
        "--options", default="{}", help="further arguments of the strategy, as JSON"
    )
    result.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    result.add_argument(
        "--timeout", type=float, default=240.0, help="time limit of each program (seconds)"
    )
    result.add_argument("--out", default="runs/context_parallel", help="folder of the measurements")
    return result


def main() -> None:
    """Run all cases, first those of the peer, and print the table."""
    args = parser().parse_args()
    rows = []
    if args.peer:
        sizes = {case.cp: case for case in args.cases}
        rows += [run_peer(args, *pair) for pair in product(sizes.values(), args.lengths)]
    for case, length, kind in product(args.cases, args.lengths, args.rows):
        if kind != "transformers":
            rows.append(run_ours(args, case, length, kind))
        elif case.cp == 1:  # transformers trains on one GPU only.
            rows += [run_ours(args, case, length, kind, attention) for attention in args.attention]
    print("\n".join(TABLE + rows + flop_rule(args)))


if __name__ == "__main__":
    main()
