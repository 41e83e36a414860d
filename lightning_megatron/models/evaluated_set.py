"""Logs of an evaluated set under its name, and means over all tokens, or pairs, of several sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.shapes import Float


@dataclass(frozen=True)
class EvaluatedSet:
    """One of the sets that a module validates or tests on.

    Args:
        module: LightningModule that logs.
        part: ``val`` or ``test``.
        name: Name of the set; None for a single one without a name.
    """

    module: Any
    part: str
    name: str | None

    @classmethod
    def of(cls, module: Any, part: str, index: int | None) -> EvaluatedSet:
        """Return the set of a loader, named by ``set_names`` of the data module.

        Args:
            module: LightningModule that logs.
            part: ``val`` or ``test``.
            index: Index of the loader; None if there is only one.
        """
        names = _names(module, part)
        if names:
            return cls(module, part, names[index or 0])
        # The suffix that Lightning gives to logs of several loaders.
        return cls(module, part, None if index is None else f"dataloader_idx_{index}")

    def bytes_per_token(self) -> float | None:
        """Return the mean length of a token, as the data module knows it; None if unknown."""
        data = _data(self.module)
        of_set = getattr(data, "bytes_per_token_of", None)
        if of_set is not None and self.name in _names(self.module, self.part):
            return of_set(self.part, self.name)
        return getattr(data, "bytes_per_token", None)

    def log(
        self,
        means: Mapping[str, Float[Tensor, ""]],
        count: Float[Tensor, ""],
        unit: str,
        unit_per_token: float = 1.0,
    ) -> None:
        """Log means of a batch, and their weight among several sets.

        Args:
            means: Means over the tokens, or pairs, of the batch, by their names.
            count: Number of tokens, or pairs, as a tensor to avoid a host read.
            unit: Unit that means of several sets are over.
            unit_per_token: Mean number of these in a token, or pair.
        """
        how: dict[str, Any] = {"sync_dist": True, "batch_size": count}
        if self.name is None:
            for mean, value in means.items():
                shown = mean == "loss"
                self.module.log(f"{self.part}_{mean}", value.detach(), prog_bar=shown, **how)
            return
        how["add_dataloader_idx"] = False
        for mean, value in means.items():
            self.module.log(f"{self.part}_{mean}/{self.name}", value.detach(), **how)
        total = count * unit_per_token
        key = f"{self.part}_{unit}/{self.name}"
        self.module.log(key, total, reduce_fx="sum", logger=False, **how)


def log_means_of_all_sets(module: Any, part: str, means: Iterable[tuple[str, str]]) -> None:
    """Log the means over all sets of an evaluation, from those of each set and their weights.

    Args:
        module: LightningModule that has logged each set by :meth:`EvaluatedSet.log`.
        part: ``val`` or ``test``.
        means: Names of the means, each with the unit that it is over.
    """
    logged = module.trainer.callback_metrics
    means = list(means)
    # All sets have the first mean, the loss, with its weight.
    before = f"{part}_{means[0][1]}/"
    names = [key.removeprefix(before) for key in logged if key.startswith(before)]
    for mean, unit in means:
        keys = [f"{part}_{mean}/{name}" for name in names]
        if names and logged.keys() >= set(keys):
            weights = [logged[f"{part}_{unit}/{name}"] for name in names]
            # Lightning's mean of a set without tokens is NaN.
            sums = [
                torch.where(weight > 0, logged[key] * weight, 0.0)
                for key, weight in zip(keys, weights, strict=True)
            ]
            value = torch.stack(sums).sum() / torch.stack(weights).sum().clamp(min=1.0)
            module.log(f"{part}_{mean}", value, prog_bar=mean == "loss", sync_dist=True)


def _data(module: Any) -> Any:
    return getattr(module.trainer, "datamodule", None)


def _names(module: Any, part: str) -> tuple[str, ...]:
    return getattr(_data(module), "set_names", {}).get(part, ())
