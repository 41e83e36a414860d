"""Hyperparameters of the module that a checkpoint was saved from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.directory import is_sharded_checkpoint
from lightning_megatron.checkpoint.load import load_metadata
from lightning_megatron.checkpoint.single_file import read_single_file


def saved_hyper_parameters(path: str) -> Mapping[str, Any] | None:
    """Return the hyperparameters of the module in a checkpoint; None if there is no checkpoint.

    The result is empty if the checkpoint has no hyperparameters.

    Args:
        path: Single file, directory of a sharded checkpoint, or anything else.

    Raises:
        CorruptDataError: If the checkpoint is damaged.
    """
    if Path(path).is_file():
        content = read_single_file(path)
    elif is_sharded_checkpoint(path):
        content = load_metadata(path)
    else:
        return None
    settings = content.get("hyper_parameters")
    return settings if isinstance(settings, Mapping) else {}
