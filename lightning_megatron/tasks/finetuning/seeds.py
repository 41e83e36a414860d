"""Fits with several seeds: their results, the median, and an ensemble of their models."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.errors import CheckpointMismatchError, UnsupportedError
from lightning_megatron.tasks.finetuning.datamodule import TaskDataModule
from lightning_megatron.tasks.finetuning.saved_scores import (
    SavedScores,
    best_scores,
    ensemble_results,
)

_SCORES = "scores"


@dataclass(frozen=True)
class SeedRun:
    """Fit with one seed.

    Args:
        seed: Seed of the initialization, of dropout and of the order of rows.
    """

    seed: int
    folder: Path

    def options(self, given: Sequence[str]) -> list[str]:
        """Return the command-line options of this fit."""
        return [
            *given,
            f"--seed_everything={self.seed}",
            f"--data.seed={self.seed}",
            f"--trainer.default_root_dir={self.folder}",
            f"--model.scores_dir={self.folder / _SCORES}",
        ]

    def fit(self, given: Sequence[str]) -> None:
        """Run the fit in a separate process, unless it has already finished.

        An interrupted fit starts again from the beginning.
        """
        started = self.folder / "options.json"
        done = self.folder / "done"
        options = json.dumps(self.options(given), indent=2)
        if self.folder.exists():
            if not started.is_file() or started.read_text() != options:
                raise UnsupportedError(
                    f"the folder of a fit must be new, or have a fit with the same options: "
                    f"{self.folder} has others, with which its results would be mixed. Use another "
                    "--output, or remove the folder."
                )
            if done.is_file():
                return
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        started.write_text(options)
        self._run("fit", self.options(given))
        done.touch()

    def test(self, given: Sequence[str]) -> None:
        """Test the best checkpoint of the fit on the test set."""
        # `last.ckpt` is the newest checkpoint, which need not be the best.
        checkpoints = sorted(
            set(self.folder.rglob("*.ckpt")) - set(self.folder.rglob("last*.ckpt"))
        )
        if len(checkpoints) != 1:
            raise CheckpointMismatchError(
                f"a fit must leave its best checkpoint alone for --test: {self.folder} has "
                f"{len(checkpoints)}. Use a ModelCheckpoint that monitors the result, with "
                "save_top_k=1."
            )
        self._run("test", [*self.options(given), f"--ckpt_path={checkpoints[0]}"])

    def scores(self, part: str, monitor: str) -> SavedScores:
        """Return the scores of the best model of the fit.

        Args:
            part: ``val`` or ``test``.
            monitor: Name of the result that decides which model is the best.
        """
        return best_scores(self.folder / _SCORES, part, monitor)

    def data(self) -> TaskDataModule:
        """Build the data module from the saved configuration of the fit."""
        [*_, path] = sorted(self.folder.rglob("config.yaml"))
        settings: Any = yaml.safe_load(path.read_text())["data"]
        module, _, name = settings["class_path"].rpartition(".")
        data_module = getattr(import_module(module), name)(**settings["init_args"])
        assert isinstance(data_module, TaskDataModule), "fits that write scores have data of a task"
        return data_module

    def _run(self, name: str, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "lightning_megatron", name, *options]
        # The standard output of this command must contain only the results.
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if code:
            raise UnsupportedError(
                f"the {name} of seed {self.seed} must succeed: it ended with the exit code {code}, "
                "and its message is above. Correct its cause and run the command again; finished "
                "fits are kept."
            )


def summary(runs: Sequence[SeedRun], part: str, monitor: str) -> dict[str, Any]:
    """Return the results of all seeds, their medians and the results of the ensemble.

    Args:
        part: ``val`` or ``test``.
        monitor: Name of the result that selects the model of each fit, and the median fit.
    """
    models = [run.scores(part, monitor) for run in runs]
    data = runs[0].data()
    data.setup("validate" if part == "val" else "test")
    metric = data.scores(part)
    assert metric is not None, "scores were written for this part"
    names = models[0].results
    order = sorted(range(len(runs)), key=lambda number: models[number].results[monitor])
    seeds = [f"seed{run.seed}" for run in runs]
    results = [scores.results for scores in models]
    return {
        "seeds": dict(zip(seeds, results, strict=True)),
        "median": {name: statistics.median(map(itemgetter(name), results)) for name in names},
        # For an even number of fits, the one with the lower result of the two in the middle.
        "median_run": order[(len(order) - 1) // 2],
        "ensemble": ensemble_results(metric, models),
    }
