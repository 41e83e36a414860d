"""Logging of the sets of an evaluation by name, and of means over all sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.shapes import Float


@dataclass(frozen=True)
class EvaluatedSet:
    """Set on which a module validates or tests.

    Args:
        module: LightningModule that logs.
        part: ``val`` or ``test``.
        name: Name of the set; None for a single set without a name.
    """

    module: Any
    part: str
    name: str | None

    @classmethod
    def of(cls, module: Any, part: str, index: int | None) -> EvaluatedSet:
        """Return the set of a dataloader, whose name comes from ``set_names`` of the data module.

        The index is None if there is only one dataloader.
        """
        names = _names(module, part)
        if names:
            return cls(module, part, names[index or 0])
        # Lightning adds this suffix to logged names if there are several dataloaders.
        return cls(module, part, None if index is None else f"dataloader_idx_{index}")

    @property
    def set_name(self) -> str:
        """Part and name of the set, such as ``val/news``, or the part if it has no name."""
        return self.part if self.name is None else f"{self.part}/{self.name}"

    def bytes_per_token(self) -> float | None:
        """Return the mean number of bytes per token by the data module; None if it is unknown."""
        data = _data(self.module)
        bytes_of = getattr(data, "bytes_per_token_of", None)
        if bytes_of is not None and self.name in _names(self.module, self.part):
            return bytes_of(self.part, self.name)
        return getattr(data, "bytes_per_token", None)

    def log(
        self,
        means: Mapping[str, Float[Tensor, ""]],
        count: Float[Tensor, ""],
        unit: str,
        unit_per_token: float = 1.0,
    ) -> None:
        """Log the means of a batch, and for a named set also their weight.

        Args:
            means: Means over the tokens, or pairs, of the batch, by name.
            count: Number of these tokens or pairs, as a tensor so that the host does not wait.
            unit: Unit in which a mean over several sets weights them, such as ``tokens``.
            unit_per_token: Mean number of units per token or pair.
        """
        options: dict[str, Any] = {"sync_dist": True, "batch_size": count}
        suffix = "" if self.name is None else f"/{self.name}"
        if self.name is not None:
            options["add_dataloader_idx"] = False
            total = count * unit_per_token
            key = f"{self.part}_{unit}{suffix}"
            self.module.log(key, total, reduce_fx="sum", logger=False, **options)
        for mean, value in means.items():
            shown = mean == "loss" and self.name is None
            name = f"{self.part}_{mean}{suffix}"
            self.module.log(name, value.detach(), prog_bar=shown, **options)


def log_means_of_all_sets(module: Any, part: str, means: Iterable[tuple[str, str]]) -> None:
    """Log the weighted means over all named sets of an evaluation, by name and unit of the weights.

    The module must have logged each set with :meth:`EvaluatedSet.log`.
    """
    logged = module.trainer.callback_metrics
    means = list(means)
    # All sets have the first mean, the loss, with its weight.
    prefix = f"{part}_{means[0][1]}/"
    names = [key.removeprefix(prefix) for key in logged if key.startswith(prefix)]
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
