"""Time and memory of long sequences on one GPU: chunks of the loss, recomputation and offload.

    python -m benchmarks.long_memory
    python -m benchmarks.long_memory --lengths 32768 131072 --settings stored chunked "full, host"

A few layers of Llama 3 8B with its vocabulary train on random tokens, one sequence per step. Each
setting and length runs in a separate process. The table has tokens/s, model TFLOP/s (recomputed
activations and logits count once), the peak of the allocator and its estimate. The row of a setting
that fails, for example for lack of memory, says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from benchmarks.measure import Measure, flops_per_token
from benchmarks.shapes import SHAPES, Tokens, Trained
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport, as_figures

_CHEAP = {"parts": ["norms", "activations"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "stored": {},
    "chunked": {"loss_chunk": "auto"},
    "chunks of 1024": {"loss_chunk": 1024},
    "chunks of 4096": {"loss_chunk": 4096},
    "cheap": {"loss_chunk": "auto", "recompute": _CHEAP},
    "half full": {"loss_chunk": "auto", "recompute": {"layers": 2}},
    "full": {"loss_chunk": "auto", "recompute": "full"},
    "full, stored": {"recompute": "full"},
    "full, host": {"loss_chunk": "auto", "recompute": {"offload": True}},
}
_WARMUP = 2


def shape_of(length: int, layers: int) -> GPTConfig:
    """Return the configuration of the model for a sequence length (tokens) and number of layers."""
    sizes = {"vocab_size": 128_256, "max_seq_length": length, "num_layers": layers}
    return GPTConfig(**vars(SHAPES["llama8b_half"]) | sizes)


def train(args: argparse.Namespace, setting: str, length: int, out: Path) -> None:
    """Train one setting, and write its figures as JSON."""
    config = SHAPES["tiny_llama"] if args.tiny else shape_of(length, args.layers)
    steps = _WARMUP + args.steps
    report = MemoryReport(after_steps=steps)
    measure = Measure(str(out), setting, _WARMUP, seq_length=config.max_seq_length)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=1,
        strategy=MegatronStrategy(check_microbatches=False, **SETTINGS[setting]),
        precision="bf16-mixed",
        max_steps=steps,
        callbacks=[measure, report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    trainer.fit(Trained(config), DataLoader(Tokens(config, steps), batch_size=1))
    seconds = sorted(measure.seconds[_WARMUP:])[args.steps // 2]
    speed = config.max_seq_length / seconds
    figures = {
        "seconds": seconds,
        "tokens_per_second": speed,
        "tflops": speed * flops_per_token(config, config.max_seq_length) / 1e12,
        "loss": measure.losses[-1],
        "memory": as_figures(report.reports[0]),
    }
    out.write_text(json.dumps(figures))


def run_alone(args: argparse.Namespace, setting: str, length: int) -> dict[str, Any] | None:
    """Train one setting in a separate process; return its figures, or None if it failed."""
    out = Path(args.out) / f"{setting.replace(', ', '_').replace(' ', '_')}_{length}.json"
    out.unlink(missing_ok=True)
    line = [sys.executable, "-m", "benchmarks.long_memory", "--one", setting, str(length), str(out)]
    line += ["--accelerator", args.accelerator, "--steps", str(args.steps)]
    line += ["--layers", str(args.layers), *(["--tiny"] if args.tiny else [])]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        failed = subprocess.run(line, check=False, stdout=file, stderr=file).returncode
    return None if failed or not out.exists() else json.loads(out.read_text())


def row(setting: str, length: int, figures: dict[str, Any] | None) -> str:
    """Return a row of the table."""
    if figures is None:
        return f"| {length} | {setting} | failed, see its log | | | | | |"
    memory = figures["memory"]
    peak = "n/a" if memory["peak"] is None else f"{memory['peak'] / 2**30:.1f}"
    estimate = memory["estimate"]
    return (
        f"| {length} | {setting} | {figures['seconds'] * 1e3:.0f} | "
        f"{figures['tokens_per_second']:,.0f} | {figures['tflops']:.0f} | {peak} | "
        f"{estimate['peak'] / 2**30:.1f} | {estimate['host'] / 2**30:.1f} |"
    )


def main() -> int:
    """Train all settings, print the table, and return the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths = [4096, 16384, 65536, 131072]
    parser.add_argument("--lengths", type=int, nargs="*", default=lengths)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny", action="store_true", help="train a tiny shape, to try the program"
    )
    parser.add_argument("--out", default="runs/long_memory")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        setting, length, out = args.one
        train(args, setting, int(length), Path(out))
        return 0
    Path(args.out).mkdir(parents=True, exist_ok=True)
    titles = "tokens | setting | ms a step | tokens/s | TFLOP/s | peak GiB | estimate | host GiB"
    lines = [f"| {titles} |", "|" + "---|" * 8]
    print("\n".join(lines), flush=True)
    num_failed = 0
    for length in args.lengths:
        for setting in args.settings:
            figures = run_alone(args, setting, length)
            num_failed += figures is None
            lines.append(row(setting, length, figures))
            print(lines[-1], flush=True)
    (Path(args.out) / "table.md").write_text("\n".join(lines) + "\n")
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
