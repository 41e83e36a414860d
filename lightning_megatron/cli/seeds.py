"""The subcommand ``seeds``: the median result of several seeds, and an ensemble of their models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.cli.arguments import at_least_one
from lightning_megatron.tasks.finetuning import SeedRun, summary

EXAMPLE = """example:
  lightning-megatron seeds --seeds 5 --monitor accuracy --test -c recipe:bert_race \\
      --model.path my_bert --data.folder RACE"""


def main(args: Sequence[str]) -> None:
    """Run the subcommand."""
    options, fit_options = seeds_parser().parse_known_args(args)
    first = options.first_seed
    runs = [
        SeedRun(seed, options.output / f"seed{seed}")
        for seed in range(first, first + options.seeds)
    ]
    for run in runs:
        run.fit(fit_options)
    report = summary(runs, "val", options.monitor)
    if options.test:
        chosen = runs[report["median_run"]]
        for run in runs:
            run.test(fit_options)
        tested = summary(runs, "test", options.monitor)
        report["test"] = {
            "of_the_median_run": chosen.scores("test", options.monitor).results,
            "ensemble": tested["ensemble"],
        }
    report["median_run"] = f"seed{first + report['median_run']}"
    print(json.dumps(report, indent=2))


def seeds_parser() -> argparse.ArgumentParser:
    """Build the parser of the subcommand's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-megatron seeds",
        usage="lightning-megatron seeds [options] -c RECIPE [options of fit]",
        description="Fit with several seeds, one after the other. Print the results of each, their "
        "median, and those of the ensemble of all models, as JSON.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=at_least_one, default=5, help="number of fits (5)")
    parser.add_argument("--first-seed", type=at_least_one, default=1, help="first seed (1)")
    parser.add_argument(
        "--monitor", default="accuracy", help="result by which models are chosen (accuracy)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/seeds"), help="folder of the fits"
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="test the model of the median fit and the ensemble on the test set",
    )
    return parser
