"""Files with the scores of all rows of a validation or test set, and ensembles of them."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError
from lightning_megatron.shapes import Bool, Float
from lightning_megatron.tasks.finetuning.scores import TaskScores

_NAME = re.compile(r"(?P<part>val|test)-step(?P<step>\d+)\.npz", re.ASCII)


@dataclass(frozen=True, eq=False)
class SavedScores:
    """Scores of all rows of a data set by one model."""

    scores: Float[Tensor, "rows *scores"]
    is_seen: Bool[Tensor, "rows"]
    results: dict[str, float]

    def write(self, folder: Path, part: str, step: int) -> Path:
        """Write the scores into a folder, which is created.

        Args:
            part: ``val`` or ``test``.
            step: Completed optimizer steps (steps).
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{part}-step{step}.npz"
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(
                file,
                scores=self.scores.numpy(),
                is_seen=self.is_seen.numpy(),
                names=np.array(list(self.results)),
                values=np.array(list(self.results.values())),
            )
        # Renaming is atomic, so a file with the final name is complete.
        os.replace(partial, path)
        return path

    @classmethod
    def read(cls, path: Path) -> SavedScores:
        """Read a file that :meth:`write` has written."""
        try:
            with np.load(path, allow_pickle=False) as file:
                names = file["names"].tolist()
                results = dict(zip(names, file["values"].tolist(), strict=True))
                scores = torch.from_numpy(file["scores"])
                is_seen = torch.from_numpy(file["is_seen"])
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CorruptDataError(
                f"{path} must be a file of scores: {error}. Run the validation again."
            ) from error
        return cls(scores, is_seen, results)


def best_scores(folder: Path, part: str, monitor: str, largest: bool = True) -> SavedScores:
    """Return the saved scores of a folder that have the best result.

    Args:
        folder: ``scores_dir`` of a run.
        part: ``val`` or ``test``.
        largest: Whether larger results are better.
    """
    matches = [_NAME.fullmatch(path.name) for path in folder.glob("*.npz")]
    steps = sorted(int(match["step"]) for match in matches if match and match["part"] == part)
    if not steps:
        raise CheckpointMismatchError(
            f"{folder} must have scores of the part {part!r}: it has none. Fit with validation "
            "data, and set scores_dir of the module."
        )
    candidates = [SavedScores.read(folder / f"{part}-step{step}.npz") for step in steps]
    if monitor not in candidates[0].results:
        raise CheckpointMismatchError(
            f"the result to compare must be one of {', '.join(candidates[0].results)}: it is "
            f"{monitor!r}. Choose one of them."
        )
    return (max if largest else min)(candidates, key=lambda scores: scores.results[monitor])


def ensemble_results(metric: TaskScores, models: Sequence[SavedScores]) -> dict[str, float]:
    """Return the results of an ensemble, whose scores combine those of its models."""
    shapes = {tuple(model.scores.shape) for model in models}
    if len(shapes) != 1 or next(iter(shapes))[0] != metric.num_rows:
        raise CheckpointMismatchError(
            f"models of an ensemble must have scores of the same {metric.num_rows} rows: their "
            f"scores have the shapes {sorted(shapes)}. Run them with the same data."
        )
    tables = torch.stack([model.scores for model in models])
    is_seen = torch.stack([model.is_seen for model in models]).all(0)
    return metric.results(metric.combined(tables), is_seen)
