"""Trainings of a recipe under several layouts, each by a separate command, and their losses."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shapes import LAYOUTS


def add_run_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options that all benchmarks of recipes share."""
    add = parser.add_argument
    add("--layouts", nargs="+", choices=list(LAYOUTS))
    add("--steps", type=int, help="steps that the host waits for")
    add("--warmup", type=int, default=4, help="steps left out of the median")
    add("--batch", type=int, help="samples of a step, of all ranks")
    add("--accelerator", default="cuda", choices=["cuda", "cpu"])
    add("--precision", default="bf16-mixed")
    add("--tolerance", type=float, help="largest difference of the losses of two layouts (nats)")
    add("--timeout", type=float, help="seconds of one training")
    add("--out", help="folder of results")
    add("options", nargs="*", help="further options of the recipe, after --")
    parser.set_defaults(**defaults)


def options_of_layout(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the options of a recipe that a layout and the precision determine."""
    layout = LAYOUTS[name]
    return {
        "trainer.accelerator": args.accelerator,
        "trainer.devices": layout.devices,
        "trainer.precision": args.precision,
        "trainer.strategy.tp": layout.tp,
        "trainer.strategy.pp": layout.pp,
    }


def options_to_measure(args: argparse.Namespace, name: str, **more: Any) -> dict[str, Any]:
    """Return the options that make a recipe measure its steps, without logs or checkpoints."""
    path = f"{args.out}/{name}.json"
    init = {"path": path, "label": name, "warmup": args.warmup, **more}
    measure = {"class_path": "benchmarks.measure.Measure", "init_args": init}
    return {
        # No callback reads parameters, so gathering them can overlap with the next step.
        "trainer.strategy.optimizer.overlap_parameters": "true",
        "trainer.limit_val_batches": 0,
        "trainer.callbacks": json.dumps([measure]),
        "trainer.enable_checkpointing": "false",
        "trainer.enable_progress_bar": "false",
        "trainer.logger": "false",
    }


def run_recipe(args: argparse.Namespace, recipe: str, options: Mapping[str, Any]) -> None:
    """Run a recipe with the given options, and with the user's options after ``--``."""
    Path(args.out).mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "lightning_megatron", "fit", "-c", recipe]
    line += [f"--{key}={value}" for key, value in options.items()]
    subprocess.run(line + args.options, check=True, timeout=args.timeout)


def figures_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the measurements of a run with :func:`options_to_measure`."""
    figures: dict[str, Any] = json.loads(Path(args.out, f"{name}.json").read_text())
    return figures


def check_same(figures_by_layout: dict[str, dict[str, Any]], tolerance: float) -> None:
    """Check that all layouts have the same losses.

    Raises:
        SystemExit: If the losses of a step differ by more than the tolerance (nats).
    """
    for number, losses in enumerate(
        zip(*(figures["losses"] for figures in figures_by_layout.values()), strict=True)
    ):
        if max(losses) - min(losses) > tolerance:
            raise SystemExit(f"losses of step {number} differ by more than {tolerance}: {losses}")
