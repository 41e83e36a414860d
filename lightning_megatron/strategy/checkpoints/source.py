"""Source of a load: a sharded checkpoint directory, or a single-file checkpoint; and the error of
``load_from_checkpoint`` for directories.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.core import saving

from lightning_megatron.checkpoint import is_sharded_checkpoint, load_metadata, verify_checkpoint
from lightning_megatron.checkpoint.collective_steps import run_on_first, verify_together
from lightning_megatron.checkpoint.consolidate import OPTIMIZERS
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.checkpoint.single_file import read_single_file, verify_single_file
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.mesh import ParallelMesh


@dataclass(frozen=True)
class CheckpointSource:
    """Checkpoint from which a run loads.

    Args:
        is_single_file: Whether it is a file of another strategy, with full tensors. Otherwise, it
            is a directory of this strategy, with an entry for each full tensor.
    """

    path: str
    is_single_file: bool

    @classmethod
    def find(cls, path: str | os.PathLike[str], mesh: ParallelMesh) -> CheckpointSource:
        """Return the checkpoint at a path or URL, as rank 0 sees it; its content is not read.

        Raises:
            CheckpointMismatchError: On all ranks, if there is neither a sharded checkpoint nor a
                file.

        Communication: one broadcast over the world.
        """
        return run_on_first(lambda: cls._at(os.fspath(path)), mesh.world_cpu)

    @classmethod
    def _at(cls, text: str) -> CheckpointSource:
        if is_sharded_checkpoint(text):
            return cls(text, is_single_file=False)
        if os.path.isdir(text) or not ("://" in text or os.path.exists(text)):
            raise CheckpointMismatchError(
                "a checkpoint must be a directory that this strategy saved, or a file of another "
                f"strategy: {text!r} is neither. An interrupted save leaves no checkpoint. Check "
                "the path, or pass ckpt_path='last'."
            )
        return cls(text, is_single_file=True)

    def verify(self, mesh: ParallelMesh, allow_unchecked: bool = False) -> None:
        """Compare the files with their checksums.

        Args:
            allow_unchecked: Whether a single file that has no checksums passes, or is behind a URL.
                Otherwise it counts as damaged.

        Raises:
            CorruptDataError: On all ranks, naming the file that is damaged or cannot be read.

        Communication: collective over all ranks.
        """
        if self.is_single_file:
            verify_together(lambda: self._verify_file(mesh, allow_unchecked), mesh.world_cpu)
        else:
            verify_checkpoint(self.path, mesh=mesh)

    def _verify_file(self, mesh: ParallelMesh, allow_unchecked: bool) -> None:
        # Only one rank looks at the file, so that all ranks agree whether it has checksums.
        if mesh.rank != 0:
            return
        # Files of torch before 1.6 are not zip archives. A file behind a URL is read only once.
        if not allow_unchecked or zipfile.is_zipfile(self.path):
            verify_single_file(self.path)

    def open(self) -> OpenCheckpoint:
        """Open a directory for reading, after it has been verified."""
        return OpenCheckpoint.open(self.path)

    def has_optimizers(self, weights_only: bool | None, mesh: ParallelMesh) -> bool:
        """Return whether optimizer states were saved, as rank 0 sees it.

        Raises:
            CorruptDataError: On all ranks, if the file that names them is damaged.
            UnsupportedError: On all ranks, if it has other objects than tensors and plain values.

        Communication: one broadcast over the world.
        """
        return run_on_first(lambda: self._has_optimizers(weights_only), mesh.world_cpu)

    def _has_optimizers(self, weights_only: bool | None) -> bool:
        if self.is_single_file:
            return "optimizer_states" in read_single_file(self.path, weights_only)
        return OPTIMIZERS in load_metadata(self.path, weights_only)


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
