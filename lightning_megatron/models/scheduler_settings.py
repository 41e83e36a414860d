"""Schedulers that a module's settings describe, and that are made when there is an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import shown

#: What a user may give: a class with its arguments, as command lines and checkpoints have it.
SchedulerGiven = Callable[[Optimizer], LRScheduler] | Mapping[str, Any] | None


@dataclass(frozen=True)
class SchedulerSettings:
    """Class and arguments of a scheduler, in plain values for checkpoints.

    Args:
        kind: Class of the scheduler.
        arguments: Arguments besides the optimizer.
    """

    kind: type[LRScheduler]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, name: str, given: SchedulerGiven) -> SchedulerSettings | None:
        """Return the settings that a user gave; None for None.

        Args:
            name: Name of the setting in errors.
            given: ``functools.partial`` of a scheduler's class, the class itself, or a mapping with
                ``class_path`` and ``init_args``.

        Raises:
            ParallelPlanError: If it is something else, or the class needs a metric.
        """
        if given is None:
            return None
        kind: Any = given
        arguments: Any = {}
        if isinstance(given, Mapping):
            kind = _class_of(given.get("class_path"))
            arguments = given.get("init_args", {})
        elif isinstance(given, partial):
            # A command line's parser puts functions of its own around the class.
            classes = [one for one in (given.func, *given.args) if isinstance(one, type)]
            kind = classes[0] if len(classes) == 1 else given
            arguments = given.keywords
        is_scheduler = isinstance(kind, type) and issubclass(kind, LRScheduler)
        if not is_scheduler or not isinstance(arguments, Mapping):
            raise ParallelPlanError(
                f"{name} must be a functools.partial of a class of torch's LRScheduler, or a "
                "mapping with its class_path and init_args, because checkpoints keep plain "
                f"values: it is {shown(given)}."
            )
        if issubclass(kind, ReduceLROnPlateau):
            raise ParallelPlanError(
                f"{name} must be a scheduler that follows optimizer steps, and "
                f"{kind.__name__} needs a metric. Use another class, or return the scheduler with "
                "its monitor from configure_optimizers of a subclass."
            )
        return cls(kind, dict(arguments))

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Return the scheduler of an optimizer."""
        return self.kind(optimizer, **self.arguments)

    def plain(self) -> dict[str, Any]:
        """Return the settings as a mapping of plain values."""
        path = f"{self.kind.__module__}.{self.kind.__qualname__}"
        return {"class_path": path, "init_args": dict(self.arguments)}

    def check(self, name: str, learning_rate: float, weight_decay: float) -> None:
        """Make the scheduler for an optimizer without a model, to refuse wrong arguments early.

        Args:
            name: Name of the setting in errors.
            learning_rate: Of the optimizer.
            weight_decay: Of the optimizer's first group; the second one has none.

        Raises:
            ParallelPlanError: If the class refuses its arguments.
        """
        groups = [
            {"params": [torch.zeros(1)], "weight_decay": decay} for decay in (weight_decay, 0.0)
        ]
        try:
            self(torch.optim.AdamW(groups, lr=learning_rate))
        except (TypeError, ValueError) as error:
            raise ParallelPlanError(f"{name} ({self.kind.__name__}): {error}") from error


def _class_of(path: Any) -> Any:
    """Return the class at a path; None if there is none."""
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    try:
        return getattr(import_module(module), name, None) if module else None
    except ImportError:
        return None
