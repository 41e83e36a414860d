"""Private names of Lightning's data loading (loaders, samplers and worker seeds), of its search for
the checkpoint to resume from, and of its parser.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function as seed_worker
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.strategy.private.loops import replace_method

__all__ = ["seed_worker"]

#: Value of ``ckpt_path`` that selects the newest checkpoint.
LAST = "last"


def train_dataloaders(trainer: Trainer) -> list[Any]:
    """Return the training dataloaders; empty before they are set up."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def training_loader_states(trainer: Trainer) -> list[Any]:
    """Return the states of this rank's resumable dataloaders."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader._state_dicts())


def observe_fetches(
    trainer: Trainer, begin: Callable[[], Any], end: Callable[[], Any], undo: ExitStack
) -> None:
    """Call functions just before and after the Trainer takes each training batch from its loaders.

    Call this before the epoch starts. ``end`` is also called if there is no further batch.
    """
    loop = trainer.fit_loop.epoch_loop
    for name, function in (("_on_before_fetch", begin), ("_on_after_fetch", end)):
        replace_method(undo, loop, name, partial(_call_both, function, getattr(loop, name)))


def _call_both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


def filter_sampler_injection(
    trainer: Trainer, permits: Callable[[DataLoader], bool], undo: ExitStack
) -> None:
    """Let Lightning replace a dataloader's sampler only if ``permits`` also returns True."""
    connector = trainer._data_connector
    requires = type(connector)._requires_distributed_sampler

    def requires_and_permits(dataloader: DataLoader) -> bool:
        return requires(connector, dataloader) and permits(dataloader)

    replace_method(undo, connector, "_requires_distributed_sampler", requires_and_permits)


def replace_last_checkpoint_search(trainer: Trainer, find: Callable[[], str | None]) -> None:
    """Resolve ``ckpt_path="last"`` by ``find``, once all ranks of the run can communicate.

    Lightning searches the file system on every rank separately, before process groups exist. Ranks
    could find different checkpoints.

    Args:
        trainer: Trainer of the run.
        find: Function that returns the path of the newest checkpoint; None without one.
    """
    connector = trainer._checkpoint_connector
    parse = type(connector)._parse_ckpt_path
    start = type(connector).resume_start

    def parse_later(state_fn: Any, ckpt_path: Any, **options: Any) -> Any:
        return ckpt_path if ckpt_path == LAST else parse(connector, state_fn, ckpt_path, **options)

    def start_with_found(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        start(connector, find() if checkpoint_path == LAST else checkpoint_path, weights_only)

    connector._parse_ckpt_path = parse_later  # type: ignore[method-assign,assignment]
    connector.resume_start = start_with_found  # type: ignore[method-assign]


class RecipeCLI(LightningCLI):
    """Lightning's command line, which takes no settings from the file at ``--ckpt_path``.

    Lightning parses the hyperparameters in the file as settings of the model: they would replace
    those of the recipe, and the parser imports each class that it reads.
    """

    @override
    def _parse_ckpt_path(self) -> None:
        pass
