"""Training of one recipe under several layouts, with a table and a picture of the loss curves.

    python -m benchmarks.layouts --layouts dp4 tp4 tp2_pp2 pp4 --steps 200 --out runs/layouts

Each layout sees the same samples in the same order, so the curves must coincide.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.extras import import_extra

FOUR_GPUS = ("dp4", "tp4", "tp2_pp2", "pp4")


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout.

    Args:
        name: Name of the layout.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size.
    """

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


def command(recipe: str, layout: Layout, args: argparse.Namespace) -> list[str]:
    """Return the command that trains ``recipe`` under one layout."""
    folder = Path(args.out) / layout.name
    line = [sys.executable, "-m", "lightning_megatron", "fit", "-c", recipe]
    line += [
        f"--trainer.strategy.init_args.tp={layout.tp}",
        f"--trainer.strategy.init_args.pp={layout.pp}",
        f"--trainer.devices={layout.devices}",
        f"--trainer.max_steps={args.steps}",
        f"--trainer.val_check_interval={args.steps}",
        f"--data.init_args.batch_size={args.batch // layout.dp}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.callbacks+=benchmarks.measure.Measure",
        f"--trainer.callbacks.path={folder.with_suffix('.json')}",
        f"--trainer.callbacks.label={layout.name}",
    ]
    return line + args.extra


def table(rows: list[dict[str, object]]) -> str:
    """Format the measurements as a Markdown table."""
    lines = [
        "| layout | ms a step | tokens/s/GPU | TFLOP/s/GPU | peak GiB a GPU | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        losses = row["losses"]
        assert isinstance(losses, list), "every run writes its losses"
        lines.append(
            f"| {row['label']} | {row['step_ms']} | {row['tokens_per_second_per_rank']:,} | "
            f"{row['model_tflops_per_rank']} | {row['peak_gib']} | {losses[-1]:.4f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Draw all loss curves, and their distance from the first, into one image file."""
    pyplot = import_extra("matplotlib.pyplot", "plot")
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2))
    first_losses = rows[0]["losses"]
    assert isinstance(first_losses, list), "every run writes its losses"
    for row, style in zip(rows, ("-", "--", "-.", ":"), strict=False):
        losses = row["losses"]
        assert isinstance(losses, list), "every run writes its losses"
        top.plot(range(1, len(losses) + 1), losses, style, label=row["label"], linewidth=1.6)
        gaps = [
            abs(loss - first_loss) for loss, first_loss in zip(losses, first_losses, strict=True)
        ]
        bottom.plot(range(1, len(gaps) + 1), gaps, style, label=row["label"], linewidth=1.2)
    top.set_ylabel("training loss (nats a token)")
    top.legend(title="layout")
    bottom.set_ylabel(f"distance from {rows[0]['label']} (nats)")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="recipes/gpt_speeches_gpu.yaml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--batch", type=int, default=32, help="samples per optimizer step over all ranks"
    )
    parser.add_argument(
        "--layouts", nargs="+", type=layout_of, default=list(map(layout_of, FOUR_GPUS))
    )
    parser.add_argument("--out", default="runs/layouts")
    parser.add_argument("extra", nargs="*", help="further options for the command, after --")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for layout in args.layouts:
        subprocess.run(command(args.recipe, layout, args), check=True)
        rows.append(json.loads((out / f"{layout.name}.json").read_text()))
    print(table(rows))
    (out / "table.md").write_text(table(rows) + "\n")
    draw(rows, out / "loss_curves.png")


if __name__ == "__main__":
    main()
