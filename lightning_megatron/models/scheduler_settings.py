"""Settings of a scheduler, from which it is built when the optimizer exists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import shown

#: Scheduler as a user, a command line or a checkpoint gives it: a class with its arguments.
SchedulerGiven = Callable[[Optimizer], LRScheduler] | Mapping[str, Any] | None


@dataclass(frozen=True)
class SchedulerSettings:
    """Class of a scheduler and its arguments except the optimizer, stored in checkpoints."""

    kind: type[LRScheduler]
    arguments: dict[str, Any]

    @classmethod
    def of(cls, name: str, scheduler: SchedulerGiven) -> SchedulerSettings | None:
        """Return the settings that a user gave; None for None.

        Args:
            scheduler: ``functools.partial`` of a scheduler's class, the class itself, or a mapping
                with ``class_path`` and ``init_args``.
        """
        if scheduler is None:
            return None
        kind: Any = scheduler
        arguments: Any = {}
        if isinstance(scheduler, Mapping):
            kind = _class_of(scheduler.get("class_path"))
            arguments = scheduler.get("init_args", {})
        elif isinstance(scheduler, partial):
            # The parser of the command line wraps the class in a function.
            classes = [
                value for value in (scheduler.func, *scheduler.args) if isinstance(value, type)
            ]
            kind = classes[0] if len(classes) == 1 else scheduler
            arguments = scheduler.keywords
        is_scheduler = isinstance(kind, type) and issubclass(kind, LRScheduler)
        if not is_scheduler or not isinstance(arguments, Mapping):
            raise ParallelPlanError(
                f"{name} must be a functools.partial of a subclass of torch's LRScheduler, or a "
                "mapping with its class_path and init_args, because checkpoints store plain "
                f"values: it is {shown(scheduler)}. A class_path never imports a module, because "
                "checkpoints have such mappings: import the module of the class before."
            )
        if issubclass(kind, ReduceLROnPlateau):
            raise ParallelPlanError(
                f"{name} must be a scheduler that depends only on the number of optimizer steps: "
                f"{kind.__name__} needs a metric. Use another class, or return the scheduler with "
                "its monitor from configure_optimizers of a subclass."
            )
        return cls(kind, dict(arguments))

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Build the scheduler of an optimizer."""
        return self.kind(optimizer, **self.arguments)

    def plain(self) -> dict[str, Any]:
        """Return the settings as a mapping of plain values."""
        path = f"{self.kind.__module__}.{self.kind.__qualname__}"
        return {"class_path": path, "init_args": dict(self.arguments)}

    def check(self, name: str, learning_rate: float, weight_decay: float) -> None:
        """Check the arguments early, by building the scheduler for an optimizer without a model."""
        groups = [
            {"params": [torch.zeros(1)], "weight_decay": decay} for decay in (weight_decay, 0.0)
        ]
        try:
            self(torch.optim.AdamW(groups, lr=learning_rate))
        except (TypeError, ValueError) as error:
            raise ParallelPlanError(f"{name} ({self.kind.__name__}): {error}") from error


def _class_of(path: Any) -> Any:
    """Return the class at a path of this package or of a module that is imported already.

    A checkpoint may give the path, and importing a module runs its code.
    """
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    package = __name__.partition(".")[0]
    if module.partition(".")[0] == package:
        return getattr(sys.modules[package], name, None)
    # `getattr` would let a module import others at the first use of a name.
    return vars(sys.modules[module]).get(name) if module in sys.modules else None
