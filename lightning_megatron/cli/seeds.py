"""The command ``seeds``: the median result of several seeds, and an ensemble of their models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveInt

from lightning_megatron.tasks.finetuning import SeedRun, summary

EXAMPLES = """example:
  lightning-megatron seeds --seeds 5 --monitor accuracy --test -c recipe:bert_race \\
      --model.path my_bert --data.folder RACE"""


def fit_seeds(
    seeds: PositiveInt = 5,
    first_seed: NonNegativeInt = 1,
    monitor: str = "accuracy",
    output: Path = Path("runs/seeds"),
    test: bool = False,
    fit_options: Sequence[str] = (),
) -> None:
    """Fit with several seeds, and print their results, the median and those of an ensemble.

    The options of fit follow: seeds [options] -c RECIPE [options of fit].

    Args:
        seeds: Number of fits.
        monitor: Result by which models are chosen.
        output: Folder of the fits.
        test: Test the model of the median fit and the ensemble on the test set.
    """
    numbers = range(first_seed, first_seed + seeds)
    runs = [SeedRun(seed, output / f"seed{seed}") for seed in numbers]
    for run in runs:
        run.fit(fit_options)
    report = summary(runs, "val", monitor)
    if test:
        chosen = runs[report["median_run"]]
        for run in runs:
            run.test(fit_options)
        report["test"] = {
            "of_the_median_run": chosen.scores("test", monitor).results,
            "ensemble": summary(runs, "test", monitor)["ensemble"],
        }
    report["median_run"] = f"seed{first_seed + report['median_run']}"
    print(json.dumps(report, indent=2))


COMMAND = fit_seeds
