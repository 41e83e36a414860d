"""Metrics of tasks, computed from the scores of rows over all batches and ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_f1_score
from typing_extensions import override

from lightning_megatron.shapes import Bool, Float, Int, Shaped


class TaskScores(Metric):
    """Metric that collects the scores of all rows of a data set over batches and ranks.

    A subclass computes results from the table of scores. Rows that no batch contained do not count.

    Args:
        metric: Arguments of ``torchmetrics.Metric``.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    row: list[Tensor]
    scores: list[Tensor]

    def __init__(self, num_rows: int, **metric: Any) -> None:
        super().__init__(**metric)
        self.num_rows = num_rows
        self.add_state("row", [], dist_reduce_fx="cat")
        self.add_state("scores", [], dist_reduce_fx="cat")

    @override
    def update(self, row: Int[Tensor, "batch"], scores: Float[Tensor, "batch *scores"]) -> None:
        """Add the scores of some rows.

        Args:
            row: Index of each row in the data set, or -1 for padding of a batch.
            scores: Scores of each row, such as the logits of its classes.
        """
        self.row.append(row)
        # The dtype of logits differs between ranks and precisions, and numpy has no bfloat16.
        self.scores.append(scores.detach().float())

    def table(self) -> tuple[Float[Tensor, "rows *scores"], Bool[Tensor, "rows"]]:
        """Return the scores of all rows, and which rows have scores, on the CPU.

        Between ``update`` and ``compute`` the table contains only this rank's rows.
        """
        row = _joined(self.row).cpu()
        scores = _joined(self.scores).cpu()
        is_row = row >= 0
        table = scores.new_zeros(self.num_rows, *scores.shape[1:])
        table[row[is_row]] = scores[is_row]
        is_seen = torch.zeros(self.num_rows, dtype=torch.bool)
        is_seen[row[is_row]] = True
        return table, is_seen

    @abstractmethod
    def results(
        self, scores: Float[Tensor, "rows *scores"], is_seen: Bool[Tensor, "rows"]
    ) -> dict[str, float]:
        """Return the results of the task by their names."""

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the results over the rows of all ranks."""
        #: Scores of all ranks, from which the last results were computed.
        self.computed = self.table()
        results = self.results(*self.computed)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in results.items()}

    @staticmethod
    def combined(tables: Float[Tensor, "models rows *scores"]) -> Float[Tensor, "rows *scores"]:
        """Return the scores of an ensemble, the mean of its models' probabilities."""
        return tables.softmax(2).mean(0)


class ClassScores(TaskScores):
    """Accuracy of the class with the highest score, over all rows and per group.

    The results are ``accuracy``, ``accuracy_GROUP`` for each group if there are several, and with
    ``has_f1`` the ``f1`` of class 1. Equal to scikit-learn's ``accuracy_score`` and ``f1_score``.

    Args:
        has_f1: Whether to report the F1 of class 1.
        metric: Arguments of ``torchmetrics.Metric``.
    """

    def __init__(
        self,
        labels: Int[Tensor, "rows"],
        groups: Int[Tensor, "rows"],
        names: Sequence[str] = ("",),
        has_f1: bool = False,
        **metric: Any,
    ) -> None:
        super().__init__(len(labels), **metric)
        self.labels = labels
        self.groups = groups
        self.names = tuple(names)
        self.has_f1 = has_f1

    @override
    def results(
        self, scores: Float[Tensor, "rows classes"], is_seen: Bool[Tensor, "rows"]
    ) -> dict[str, float]:
        chosen = scores.argmax(1)
        is_right = chosen == self.labels
        results = {"accuracy": _share(is_right, is_seen)}
        if len(self.names) > 1:
            for number, name in enumerate(self.names):
                results[f"accuracy_{name}"] = _share(is_right, is_seen & (self.groups == number))
        if self.has_f1:
            results["f1"] = float(binary_f1_score(chosen[is_seen], self.labels[is_seen]))
        return results


def _share(is_right: Tensor, is_counted: Tensor) -> float:
    """Return the fraction of the counted rows that are right, NaN if no row is counted."""
    return float(is_right[is_counted].double().mean())


def _joined(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Return a state of a metric as one tensor; before its reduction over ranks it is a list."""
    return parts if isinstance(parts, Tensor) else torch.cat(list(parts))


def labelled(batch: Mapping[str, Shaped[Tensor, "batch *_"]]) -> Int[Tensor, ""]:
    """Return the number of rows of a batch that are not padding (rows)."""
    return (batch["row"] >= 0).sum()
