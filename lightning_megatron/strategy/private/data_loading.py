"""Private names of Lightning's data loading: loaders, samplers and worker seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function as seed_worker
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

__all__ = [
    "filter_sampler_injection",
    "restore_sampler_injection",
    "seed_worker",
    "train_dataloaders",
    "training_loader_states",
]

#: Attributes that the functions below use: (path of the owner from the Trainer, name).
TRAINER_ATTRIBUTES = (
    ("fit_loop", "_combined_loader"),
    ("", "_data_connector"),
    ("_data_connector", "_requires_distributed_sampler"),
)


def train_dataloaders(trainer: Trainer) -> list[Any]:
    """Return the training dataloaders; empty before they are set up."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def training_loader_states(trainer: Trainer) -> list[Any]:
    """Return the states of this rank's resumable dataloaders."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader._state_dicts())


def filter_sampler_injection(trainer: Trainer, permits: Callable[[DataLoader], bool]) -> None:
    """Let Lightning replace a dataloader's sampler only if ``permits`` also returns True."""
    connector = trainer._data_connector
    requires = type(connector)._requires_distributed_sampler

    def requires_and_permits(dataloader: DataLoader) -> bool:
        return requires(connector, dataloader) and permits(dataloader)

    connector._requires_distributed_sampler = requires_and_permits  # type: ignore[method-assign]


def restore_sampler_injection(trainer: Trainer) -> None:
    """Undo :func:`filter_sampler_injection`."""
    vars(trainer._data_connector).pop("_requires_distributed_sampler", None)
