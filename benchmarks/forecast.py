"""Memory and time of training steps: measured on GPUs, and estimated without them.

    python -m benchmarks.forecast --devices 2 --out runs/forecast
    python -m benchmarks.forecast --table --out runs/forecast

The first command trains each case for a few steps in processes of its own, and writes a file for
each. The second needs no GPU: it estimates what the files describe, and prints both. The cases of
``HELD_OUT`` were chosen before the estimate of time was fitted, and no figure of them has gone into
it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.measure import QUIET, Measure, heading, option_parser, strategy_of
from benchmarks.shapes import Tokens, Trained, changed
from lightning_megatron import MegatronStrategy
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.step_time import estimate_time
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.budget import GIB
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport, StageReport
from lightning_megatron.strategy.memory_estimate import MemoryCase


@dataclass(frozen=True)
class Case:
    """Training to measure.

    Args:
        model: Name of a shape.
        devices: Number of ranks.
        batch: Samples per data-parallel rank and step.
        microbatch: Samples per microbatch.
        layers: Number of layers; 0 means that of the shape.
        length: Tokens of a sample; 0 means that of the shape.
        precision: Precision of the Trainer.
        options: Further arguments of the strategy.
    """

    model: str
    devices: int
    batch: int
    microbatch: int
    layers: int = 0
    length: int = 0
    precision: str = "bf16-mixed"
    options: dict[str, Any] = field(default_factory=dict)


_SEGMENTS = {"cuda_graphs": "segments"}
_FP8 = {"fp8": "tensorwise", **_SEGMENTS}

#: Trainings that are compared with the estimates of time and memory.
HELD_OUT: dict[str, Case] = {
    "gpt2_eager": Case("gpt2_1_2b", 1, 8, 8),
    "gpt2_graphs_two_microbatches": Case("gpt2_1_2b", 1, 8, 4, options=_SEGMENTS),
    "llama_one_gpu": Case("llama8b_half", 1, 2, 2, layers=6, options=_SEGMENTS),
    "llama_one_gpu_fp8": Case("llama8b_half", 1, 2, 2, layers=6, options=_FP8),
    "llama_8192_recomputed": Case(
        "llama8b_half", 1, 1, 1, layers=8, length=8192, options={"recompute": "full"}
    ),
    "mixtral_one_gpu": Case("mixtral_s", 1, 1, 1, layers=2),
    "llama_dp2": Case("llama8b_half", 2, 1, 1, layers=12, options=_SEGMENTS),
    "llama_dp2_fp8_four_microbatches": Case("llama8b_half", 2, 4, 1, layers=12, options=_FP8),
    "llama_tp2_eager": Case("llama8b_half", 2, 2, 2, layers=12, options={"tp": 2}),
    "llama_tp2_fp8": Case("llama8b_half", 2, 2, 2, layers=16, options={"tp": 2, **_FP8}),
    "gpt2_2_5b_tp2": Case("gpt2_2_5b", 2, 8, 8, layers=36, options={"tp": 2, **_SEGMENTS}),
    "llama_pp2_1f1b": Case("llama8b_half", 2, 6, 1, layers=12, options={"pp": 2}),
    "llama_pp2_zb_v": Case(
        "llama8b_half", 2, 8, 1, layers=12, options={"pp": 2, "vpp": 2, "schedule": "zb-v"}
    ),
    "gpt2_pp2_interleaved": Case(
        "gpt2_1_2b", 2, 16, 4, options={"pp": 2, "vpp": 2, "schedule": "interleaved"}
    ),
    "llama_cp2_32768": Case("llama8b_half", 2, 1, 1, layers=6, length=32768, options={"cp": 2}),
    "mixtral_ep2": Case("mixtral_s", 2, 1, 1, layers=3, options={"ep": 2, **_SEGMENTS}),
    "qwen3_ep2": Case("qwen3_12", 2, 1, 1, layers=8, options={"ep": 2, **_SEGMENTS}),
    "tiny_moe_ep2": Case("tiny_moe", 2, 8, 8, options={"ep": 2, **_SEGMENTS}),
    "mixtral_pp2": Case("mixtral_s", 2, 8, 1, layers=4, options={"pp": 2, "schedule": "zb-h1"}),
}
#: Trainings whose memory GPUs have held; tests compare estimates with it.
HELD: dict[str, Case] = {
    "gpt2": Case("gpt2_1_2b", 1, 8, 8),
    "gpt2_full": Case("gpt2_1_2b", 1, 8, 8, options={"recompute": "full"}),
    "gpt2_selective": Case("gpt2_1_2b", 1, 8, 4, options={"recompute": "selective"}),
    "gpt2_float32": Case("gpt2_1_2b", 1, 4, 4, layers=20, precision="32-true"),
    "llama2": Case("llama8b_half", 1, 2, 2, layers=2),
    "llama4": Case("llama8b_half", 1, 2, 2, layers=4),
}
CASES = HELD | HELD_OUT | {"tiny_pp2": Case("tiny_gpt2", 2, 4, 1, options={"pp": 2})}


class Described(Callback):
    """Keeps what the estimates of a run depend on: model, layout, settings and kind of device."""

    def __init__(self) -> None:
        self.case: MemoryCase | None = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.case is None:
            self.case = MemoryCase.of_batch(strategy_of(trainer).run, trainer.optimizers, batch)


def train(case: Case, accelerator: str, steps: int, out: Path) -> None:
    """Train one case; rank 0 writes its figures and its description."""
    config = changed(case.model, layers=case.layers, length=case.length)
    report, described = MemoryReport(), Described()
    measure = Measure(str(out), out.stem, warmup=8, steps=steps, row_steps=2 * steps)
    trainer = Trainer(
        accelerator=accelerator,
        devices=case.devices,
        # The check of microbatches runs the first batch and would raise the measured peak.
        strategy=MegatronStrategy(
            microbatch_size=case.microbatch, job={"check_microbatches": False}, **case.options
        ),
        precision=case.precision,  # type: ignore[arg-type]
        max_steps=measure.last_step,
        gradient_clip_val=1.0,
        callbacks=[report, described, measure],
        **QUIET,
    )
    data = Tokens(config, measure.last_step * case.batch * case.devices)
    routing = "natural" if config.experts is None else "balanced"
    module = Trained(config, routing, case.microbatch * config.max_seq_length)
    trainer.fit(module, DataLoader(data, batch_size=case.batch, drop_last=True))
    if trainer.is_global_zero:
        figures = measure.figures | {"stages": [_figures_of(one) for one in report.reports]}
        out.write_text(json.dumps(figures))
        out.with_suffix(".pickle").write_bytes(pickle.dumps(described.case))


def _figures_of(report: StageReport) -> dict[str, Any]:
    """Return a report as a dictionary of plain numbers."""
    return {
        "stage": report.stage,
        "estimate": asdict(report.estimate) | {"peak": report.estimate.peak},
        "held": report.held,
        "peak": report.peak,
        "graphs": report.graphs,
    }


def run_case(name: str, args: argparse.Namespace) -> None:
    """Train one case in processes of its own."""
    out = Path(args.out) / f"{name}.json"
    out.unlink(missing_ok=True)
    line = [sys.executable, "-m", "benchmarks.forecast", "--case", name, "--out", args.out]
    line += ["--accelerator", args.accelerator, "--steps", str(args.steps)]
    print(f"== {name}: {CASES[name]}", flush=True)
    try:
        subprocess.run(line, check=False, timeout=args.limit)
    except subprocess.TimeoutExpired:
        print(f"{name} took more than {args.limit} s", flush=True)


def table(out: Path) -> str:
    """Estimate what the files of a folder describe, and format it beside what was measured."""
    lines = heading(
        "case", "stage", "GiB, estimate", "GiB, measured", "ratio", "ms, estimate", "ms in a row"
    )
    for name in CASES:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        figures = json.loads(path.read_text())
        # A file that this program has written.
        case: MemoryCase = pickle.loads(path.with_suffix(".pickle").read_bytes())  # noqa: S301
        times = _times(case, figures)
        for estimate, stage in zip(case.estimate(), figures["stages"], strict=True):
            sizes = "n/a | n/a"
            if stage["peak"]:
                sizes = f"{stage['peak'] / GIB:.2f} | {estimate.peak / stage['peak']:.3f}"
            lines.append(
                f"| {name} | {estimate.stage} | {estimate.peak / GIB:.2f} | {sizes} | {times} |"
            )
    return "\n".join(lines)


def _times(case: MemoryCase, figures: dict[str, Any]) -> str:
    """Return the estimated and the measured time of a step in a row, and how far they differ."""
    measured = figures.get("row_mean_ms")
    if measured is None:
        return "n/a | n/a"
    assert isinstance(case.model, GPTConfig), "all cases are of models of this package"
    cluster = Cluster(num_gpus=case.layout.world_size)
    # The callbacks of these runs may read parameters, which are therefore gathered before.
    step = estimate_time(case.model, case.layout, case.training, cluster, overlaps_gathers=False)
    ms = step.seconds * 1e3
    return f"{ms:.1f} | {measured:.1f} ({100 * (ms / measured - 1):+.1f} %)"


def main() -> None:
    """Train the cases, or print the table."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--devices", type=int, default=1, help="run only cases with this number of ranks")
    add("--cases", nargs="*", choices=list(CASES), help="run only these cases")
    add("--case", choices=list(CASES), help=argparse.SUPPRESS)
    add("--table", action="store_true", help="print the table of a folder, and train nothing")
    add("--accelerator", default="cuda", choices=["cuda", "cpu"])
    add("--steps", type=int, default=5, help="measured steps; twice as many in a row follow")
    add("--limit", type=float, default=90, help="longest time of a case (s)")
    add("--out", default="runs/forecast")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.table:
        print(table(out), flush=True)
    elif args.case:
        train(CASES[args.case], args.accelerator, args.steps, out / f"{args.case}.json")
    else:
        for name in args.cases or [n for n, c in HELD_OUT.items() if c.devices == args.devices]:
            run_case(name, args)


if __name__ == "__main__":
    main()
