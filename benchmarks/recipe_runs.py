"""Trainings of a recipe under several layouts, each by a separate command, and their losses."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp


def layout_of(name: str) -> Layout:
    """Return the layout with the name ``name``.

    Raises:
        ArgumentTypeError: If the name has another form.
    """
    parts: Sequence[str] = () if name == "single" else name.split("_")
    sizes = {part[:2]: int(part[2:]) for part in parts if re.fullmatch(r"(tp|pp|dp)[1-9]\d*", part)}
    if len(sizes) < len(parts):
        raise ArgumentTypeError(
            f"a layout must be single, or tp, pp and dp with sizes: {name!r} is not. Use tp2_pp2."
        )
    return Layout(name, **sizes)


def add_run_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options that all benchmarks of recipes share."""
    add = parser.add_argument
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


def options_of_layout(args: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Return the options of a recipe that a layout and the precision determine."""
    return {
        "trainer.accelerator": args.accelerator,
        "trainer.devices": layout.devices,
        "trainer.precision": args.precision,
        "trainer.strategy.tp": layout.tp,
        "trainer.strategy.pp": layout.pp,
    }


def options_to_measure(args: argparse.Namespace, layout: Layout, **more: Any) -> dict[str, Any]:
    """Return the options that make a recipe measure its steps, without logs or checkpoints."""
    path = f"{args.out}/{layout.name}.json"
    init = {"path": path, "label": layout.name, "warmup": args.warmup, **more}
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


def figures_of(args: argparse.Namespace, layout: Layout) -> dict[str, Any]:
    """Return the measurements of a run with :func:`options_to_measure`."""
    figures: dict[str, Any] = json.loads(Path(args.out, f"{layout.name}.json").read_text())
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
