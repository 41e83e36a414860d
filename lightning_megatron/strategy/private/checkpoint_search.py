"""Private names of Lightning's search for the checkpoint to resume from, and of its parser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

#: Value of ``ckpt_path`` that selects the newest checkpoint.
LAST = "last"

#: Attributes that the functions below use: (path of the owner from the Trainer, name).
TRAINER_ATTRIBUTES = (
    ("", "_checkpoint_connector"),
    ("_checkpoint_connector", "_parse_ckpt_path"),
    ("_checkpoint_connector", "resume_start"),
)


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
