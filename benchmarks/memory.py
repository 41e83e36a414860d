"""Comparison of the estimated and the measured peak memory of every pipeline stage.

    python -m benchmarks.memory --devices 4 --out runs/memory
    python -m benchmarks.memory --devices 1 --cases gpt2 gpt2_full llama4

Each case trains for a few steps in separate processes. The command fails if the relative error of
an estimate is larger than ``--tolerance``. Without GPUs the peak is not measured, and the tables
show only the estimate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.measure import QUIET, heading, option_parser
from benchmarks.shapes import Tokens, Trained, changed
from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport, StageReport


@dataclass(frozen=True)
class Case:
    """Training to measure.

    Args:
        model: Name of a shape.
        devices: Number of ranks.
        batch: Samples per data-parallel rank and step.
        microbatch: Samples per microbatch.
        layers: Number of layers; 0 means that of the shape.
        precision: Precision of the Trainer.
        options: Further arguments of the strategy.
    """

    model: str
    devices: int
    batch: int
    microbatch: int
    layers: int = 0
    precision: str = "bf16-mixed"
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "gpt2": Case("gpt2_1_2b", 1, 8, 8),
    "gpt2_full": Case("gpt2_1_2b", 1, 8, 8, options={"recompute": "full"}),
    "gpt2_selective": Case("gpt2_1_2b", 1, 8, 4, options={"recompute": "selective"}),
    "gpt2_float32": Case("gpt2_1_2b", 1, 4, 4, layers=20, precision="32-true"),
    "llama2": Case("llama8b_half", 1, 2, 2, layers=2),
    "llama4": Case("llama8b_half", 1, 2, 2, layers=4),
    "llama8_zero0": Case("llama8b_half", 2, 1, 1, layers=8, options={"optimizer": {"zero": 0}}),
    "llama8_dp2": Case("llama8b_half", 2, 1, 1, layers=8),
    "llama8_tp2": Case("llama8b_half", 2, 4, 2, layers=8, options={"tp": 2}),
    "llama8_tp2_no_sp": Case(
        "llama8b_half", 2, 4, 2, layers=8, options={"tp": 2, "sequence_parallel": False}
    ),
    "llama8_pp2": Case("llama8b_half", 2, 8, 1, layers=8, options={"pp": 2}),
    "llama8_pp2_vpp2": Case("llama8b_half", 2, 8, 1, layers=8, options={"pp": 2, "vpp": 2}),
    "llama16_dp4": Case("llama8b_half", 4, 1, 1),
    "llama16_tp4": Case("llama8b_half", 4, 4, 4, options={"tp": 4}),
    "llama16_tp2_pp2": Case("llama8b_half", 4, 8, 1, options={"tp": 2, "pp": 2}),
    "llama16_pp4": Case("llama8b_half", 4, 16, 1, options={"pp": 4}),
    "llama16_pp4_vpp2": Case("llama8b_half", 4, 16, 1, options={"pp": 4, "vpp": 2}),
    "moe": Case("tiny_moe", 1, 8, 8),
    "moe_experts": Case("tiny_moe", 1, 8, 8, options={"recompute": "experts"}),
    "moe_full": Case("tiny_moe", 1, 8, 8, options={"recompute": "full"}),
    "moe_ep2": Case("tiny_moe", 2, 8, 8, options={"ep": 2}),
    "moe_ep2_all_to_all": Case(
        "tiny_moe", 2, 8, 8, options={"ep": 2, "experts": {"transport": "all_to_all"}}
    ),
    "moe_tp2_ep2": Case("tiny_moe", 2, 8, 8, options={"tp": 2, "ep": 2, "etp": 1}),
    "moe_pp2": Case("tiny_moe", 2, 8, 4, options={"pp": 2}),
    "tiny": Case("tiny_llama", 1, 4, 2),
    "tiny_moe": Case("tiny_mixtral", 1, 4, 2),
    "tiny_pp2": Case("tiny_gpt2", 2, 4, 1, options={"pp": 2}),
}


def train(case: Case, accelerator: str, steps: int) -> list[dict[str, Any]]:
    """Train one case; return the memory of every stage on rank 0, empty on other ranks."""
    config = changed(case.model, layers=case.layers)
    report = MemoryReport(after_steps=steps)
    trainer = Trainer(
        accelerator=accelerator,
        devices=case.devices,
        # The check of microbatches runs the first batch and would raise the measured peak.
        strategy=MegatronStrategy(
            microbatch_size=case.microbatch, job={"check_microbatches": False}, **case.options
        ),
        precision=case.precision,  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[report],
        **QUIET,
    )
    data = Tokens(config, steps * case.batch * case.devices)
    trainer.fit(Trained(config), DataLoader(data, batch_size=case.batch, drop_last=True))
    return [_figures_of(stage) for stage in report.reports] if trainer.is_global_zero else []


def _figures_of(report: StageReport) -> dict[str, Any]:
    """Return a report as a dictionary of plain numbers."""
    return {
        "stage": report.stage,
        "estimate": asdict(report.estimate) | {"peak": report.estimate.peak},
        "held": report.held,
        "peak": report.peak,
        "graphs": report.graphs,
        "ratio": report.ratio,
        "bytes_per_parameter": report.bytes_per_parameter,
    }


def run_case(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one case in a separate process and return its results; empty if it failed."""
    out = Path(args.out) / f"{name}.json"
    out.unlink(missing_ok=True)
    line = [sys.executable, "-m", "benchmarks.memory", "--case", name, "--out", args.out]
    line += ["--accelerator", args.accelerator, "--steps", str(args.steps)]
    print(f"== {name}: {CASES[name]}", flush=True)
    subprocess.run(line, check=False)
    return json.loads(out.read_text()) if out.exists() else []


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Format the peaks as a Markdown table."""
    lines = heading(
        "case",
        "stage",
        "static GiB",
        "held GiB",
        "bytes a parameter",
        "peak, estimate",
        "peak, measured",
        "ratio",
    )
    for name, stages in results.items():
        if not stages:
            lines.append(f"| {name} | failed | | | | | | |")
        for stage in stages:
            static = sum(stage["estimate"][part] for part in stage["held"])
            sizes = [static, sum(stage["held"].values()), stage["estimate"]["peak"], stage["peak"]]
            static_gib, held_gib, estimate_gib, peak_gib = (
                "n/a" if size is None else f"{size / 2**30:.2f}" for size in sizes
            )
            ratio = "n/a" if stage["ratio"] is None else f"{stage['ratio']:.3f}"
            lines.append(
                f"| {name} | {stage['stage']} | {static_gib} | {held_gib} | "
                f"{stage['bytes_per_parameter']:.2f} | {estimate_gib} | "
                f"{peak_gib} | {ratio} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Train, print the table and return the number of wrong estimates and failed cases."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--devices", type=int, default=1, help="run only cases with at most this number of ranks")
    add("--cases", nargs="*", choices=list(CASES), help="run only these cases")
    add("--case", choices=list(CASES), help=argparse.SUPPRESS)
    add("--accelerator", default="cuda", choices=["cuda", "cpu"])
    add("--steps", type=int, default=3)
    add("--tolerance", type=float, default=0.1)
    add("--out", default="runs/memory")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.case:
        figures = train(CASES[args.case], args.accelerator, args.steps)
        if figures:
            (out / f"{args.case}.json").write_text(json.dumps(figures))
        return 0
    names = args.cases or [
        name
        for name, case in CASES.items()
        if case.devices <= args.devices and not name.startswith("tiny")
    ]
    results = {name: run_case(name, args) for name in names}
    print(table(results), flush=True)
    ratios = [
        stage["ratio"]
        for stages in results.values()
        for stage in stages
        if stage["ratio"] is not None
    ]
    failed = sum(not stages for stages in results.values())
    return failed + sum(abs(ratio - 1) > args.tolerance for ratio in ratios)


if __name__ == "__main__":
    sys.exit(main())
