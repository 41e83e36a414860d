"""Verification of checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from lightning_megatron.checkpoint.collective_steps import CaughtError, describe
from lightning_megatron.checkpoint.directory import Checkpoint, find_checkpoint
from lightning_megatron.checkpoint.header import METADATA, TENSOR_INDEX
from lightning_megatron.checkpoint.storage import read_record
from lightning_megatron.checkpoint.tensor_files import check_size, damaged
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh

logger = logging.getLogger(__name__)
_SINGLE_RANK = MeshAxis("alone")


def verify_checkpoint(
    path: str | os.PathLike[str], deep: bool = True, mesh: ParallelMesh | None = None
) -> None:
    """Check that every file of a checkpoint is intact.

    Args:
        mesh: Mesh whose ranks divide the files among them and call this function together; None
            reads all files in this process.

    Raises:
        CorruptDataError: If a file is damaged; the message names the file. With a mesh, all ranks
            raise.

    Communication: with a mesh, one gather over the world.
    """
    axis = _SINGLE_RANK if mesh is None else mesh.world_cpu
    verify_together(lambda: _verify(path, deep, axis), axis)


def verify_together(check: Callable[[], object], axis: MeshAxis) -> None:
    """Run a check of files on every rank; if it fails on one rank, all ranks raise.

    Raises:
        CorruptDataError: On all ranks, if a file is damaged or cannot be read on one.
        CheckpointMismatchError: On all ranks, if the check raises it on one.
        UnsupportedError: On all ranks, if the check raises it on one.

    Communication: one gather of errors.
    """
    with CaughtError(BaseException) as caught:
        check()
    local_error = caught.error
    # All ranks raise the error of the first rank that failed: they must continue in the same way.
    errors = [
        error for error in all_gather_objects(_to_send(local_error), axis) if error is not None
    ]
    if local_error is not None and not isinstance(local_error, Exception):
        raise local_error
    interrupts = [error for error in errors if not isinstance(error, Exception)]
    if errors:
        raise (interrupts or errors)[0]


def _verify(path: str | os.PathLike[str], deep: bool, axis: MeshAxis) -> None:
    checkpoint = find_checkpoint(path)
    for name in (METADATA, TENSOR_INDEX):
        if name not in checkpoint.header.files:
            raise damaged(checkpoint, name, "the header does not list it")
    # Sort by size, so that all ranks read about the same number of bytes.
    files = sorted(
        checkpoint.header.files, key=lambda name: (-checkpoint.header.files[name].size, name)
    )
    for name in files[axis.rank :: axis.size]:
        check_size(checkpoint, name)
        if deep:
            _check_content(checkpoint, name)


def _check_content(checkpoint: Checkpoint, name: str) -> None:
    expected = checkpoint.header.files[name]
    actual = read_record(checkpoint.folder, name)
    if actual != expected:
        raise damaged(
            checkpoint,
            name,
            f"its checksum is {actual.checksum}, but {expected.checksum} was written",
        )


def _to_send(error: BaseException | None) -> BaseException | None:
    """Convert a rank's error to one that can be sent to other ranks; None stays None."""
    if error is None or isinstance(
        error, (CorruptDataError, CheckpointMismatchError, UnsupportedError)
    ):
        return error
    if not isinstance(error, Exception):
        return KeyboardInterrupt(f"another rank was interrupted: {describe(error)}")
    if not isinstance(error, OSError):
        logger.warning("a check of a checkpoint failed", exc_info=error)
    return CorruptDataError(
        f"every file of a checkpoint must be readable: {describe(error)}. Use another checkpoint, "
        "or repair the file system."
    )
