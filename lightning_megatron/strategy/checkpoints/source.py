"""Source of a load: a sharded checkpoint directory, or a single-file checkpoint."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass

from lightning_megatron.checkpoint import is_sharded_checkpoint, load_metadata, verify_checkpoint
from lightning_megatron.checkpoint.consolidate import OPTIMIZERS
from lightning_megatron.checkpoint.single_file import read_single_file, verify_single_file
from lightning_megatron.checkpoint.stored import Stored
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh


@dataclass(frozen=True)
class CheckpointSource:
    """Checkpoint from which a run loads.

    Args:
        path: Path or URL.
        is_single_file: Whether it is a file of another strategy, with full tensors. Otherwise, it
            is a directory of this strategy, with an entry for each full tensor.
    """

    path: str
    is_single_file: bool

    @classmethod
    def find(cls, path: str | os.PathLike[str]) -> CheckpointSource:
        """Return the checkpoint at a path or URL; its content is not read.

        Raises:
            CheckpointMismatchError: If there is neither a sharded checkpoint nor a file.
        """
        text = os.fspath(path)
        if is_sharded_checkpoint(text):
            return cls(text, is_single_file=False)
        if os.path.isdir(text) or not ("://" in text or os.path.exists(text)):
            raise CheckpointMismatchError(
                "a checkpoint must be a directory that this strategy saved, or a file of another "
                f"strategy: {text!r} is neither. A save that was interrupted leaves nothing. Check "
                "the path, or pass ckpt_path='last'."
            )
        return cls(text, is_single_file=True)

    @property
    def has_checksums(self) -> bool:
        """Return whether the checkpoint can be verified."""
        # Files of torch before 1.6 are not zip archives. A file behind a URL is read only once.
        return not self.is_single_file or zipfile.is_zipfile(self.path)

    def verify(self, mesh: ParallelMesh) -> None:
        """Compare the files with their checksums; a single file without any counts as damaged.

        Args:
            mesh: Groups of this rank.

        Raises:
            CorruptDataError: On all ranks, naming the damaged file.

        Communication: collective over all ranks.
        """
        if not self.is_single_file:
            verify_checkpoint(self.path, mesh=mesh)
            return
        error: CorruptDataError | None = None
        if mesh.rank == 0:
            try:
                verify_single_file(self.path)
            except CorruptDataError as caught:
                error = caught
        error = broadcast_object(error, mesh.world_cpu)
        if error is not None:
            raise error

    def open(self) -> Stored:
        """Open a directory for reading, after it has been verified.

        Raises:
            CorruptDataError: If its tensor index is inconsistent.
        """
        return Stored.open(self.path)

    def has_optimizers(self, weights_only: bool | None) -> bool:
        """Return whether optimizer states were saved.

        Args:
            weights_only: False unpickles objects of any type, which can run code from the file.
                True and None accept only tensors and plain values.
        """
        if self.is_single_file:
            return "optimizer_states" in read_single_file(self.path, weights_only)
        return OPTIMIZERS in load_metadata(self.path, weights_only)
