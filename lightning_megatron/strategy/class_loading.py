"""Error message of ``load_from_checkpoint`` for checkpoints that are directories."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.core import saving

from lightning_megatron.checkpoint import is_sharded_checkpoint
from lightning_megatron.errors import CheckpointMismatchError


@dataclass(frozen=True)
class _Reader:
    """Lightning's file reader, which also refuses directories that this strategy saved."""

    load: Callable[..., Any]

    def __call__(self, path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        path = path_or_url
        is_path = isinstance(path, str | os.PathLike) and not str(path).startswith("http")
        if is_path and is_sharded_checkpoint(path):
            raise CheckpointMismatchError(
                f"load_from_checkpoint reads one file: {os.fspath(path)} is a directory that "
                "MegatronStrategy saved. Its tensors are in several files. Write one file with "
                f"`lightning-megatron checkpoint consolidate {os.fspath(path)} plain.ckpt "
                "--weights-only` and load that file, or pass the directory as ckpt_path to fit, "
                "validate, test or predict with MegatronStrategy."
            )
        return self.load(path_or_url, *args, **kwargs)


def install_directory_check() -> None:
    """Install the check in Lightning's class methods; repeated calls have no effect.

    ``load_from_checkpoint`` is a class method of the user's modules and uses no strategy.
    Lightning's file reader is therefore the only place for this check.
    """
    if not isinstance(saving.pl_load, _Reader):
        reader: Any = _Reader(saving.pl_load)
        saving.pl_load = reader
