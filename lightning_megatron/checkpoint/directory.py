"""The directory of a checkpoint: complete under its name, or not there at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout

FORMAT = 1
HEADER, METADATA = "checkpoint.json", "meta.pt"
#: Written last by torch.distributed.checkpoint: the list of tensors and where they are.
TENSOR_INDEX = ".metadata"


@dataclass(frozen=True)
class Header:
    """Hold what is known of a checkpoint without unpickling anything.

    Args:
        layout: The layout that saved it.
        torch: The version of torch that saved it.
        format: Number of the directory's format.
    """

    layout: ParallelLayout
    torch: str
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the header into a directory."""
        (folder / HEADER).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Header:
        """Read the header of a directory.

        Raises:
            CorruptDataError: If it is missing or damaged.
            UnsupportedError: If a later version of this library wrote it.
        """
        try:
            fields = json.loads((folder / HEADER).read_text(encoding="utf-8"))
            written, layout = int(fields["format"]), ParallelLayout(**fields["layout"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptDataError(
                f"a checkpoint directory must hold a readable {HEADER}: {folder} does not ({type(error).__name__}: "
                f"{error}). It names the layout that saved it. Use another checkpoint."
            ) from error
        if written > FORMAT:
            raise UnsupportedError(
                f"the checkpoint's format ({written}) must not be newer than this version's ({FORMAT}): {folder}. "
                "Its tensors may mean something else. Upgrade lightning-megatron."
            )
        return cls(layout, str(fields.get("torch")), written)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint on a file system that all nodes see.

    Raises:
        UnsupportedError: For a URL.
    """
    if "://" in os.fspath(path):
        raise UnsupportedError(
            f"a sharded checkpoint must be on a mounted file system: {os.fspath(path)!r}. A directory of many files "
            "cannot be replaced as one elsewhere. Use a local path and copy the directory afterwards."
        )
    return Path(path)


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether ``path`` is a complete checkpoint directory of this library."""
    if "://" in os.fspath(path):
        return False
    return all((_readable(Path(path)) / name).is_file() for name in (HEADER, METADATA, TENSOR_INDEX))


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the directory to read for the checkpoint ``path``.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint.
    """
    if not is_sharded_checkpoint(path):
        raise CheckpointMismatchError(
            f"a sharded checkpoint must be a directory with {HEADER}, {METADATA} and {TENSOR_INDEX}: "
            f"{os.fspath(path)!r} is not. One that was interrupted while saving is never complete. Pass the "
            "directory that save_checkpoint wrote."
        )
    return _readable(local_path(path))


def unfinished_path(path: Path) -> Path:
    """Return the sibling directory that a checkpoint is written to before it gets its name."""
    return path.with_name(f".{path.name}.unfinished")


def prepare(path: Path) -> None:
    """Create an empty directory for the files of ``path``; what an interrupted save left there is removed."""
    _remove(unfinished_path(path))
    unfinished_path(path).mkdir(parents=True)


def publish(path: Path) -> None:
    """Give the finished directory its name, replacing what has that name now.

    A process that dies in between leaves the old checkpoint under a hidden name, where it is still found.
    """
    replaced = _replaced_path(path)
    # A link whose checkpoint is gone is in the way as well.
    if os.path.lexists(path):
        _remove(replaced)
        path.rename(replaced)
    unfinished_path(path).rename(path)
    _sync(path.parent)
    _remove(replaced)


def write_metadata(folder: Path, metadata: dict[str, Any], layout: ParallelLayout) -> None:
    """Write the header and the metadata, through to the disk."""
    Header(layout, torch.__version__).write(folder)
    with open(folder / METADATA, "wb") as file:
        torch.save(metadata, file)
        file.flush()
        os.fsync(file.fileno())


def on_first_rank(action: Callable[[], None], mesh: ParallelMesh, what: str) -> None:
    """Run ``action`` on rank 0 while the others wait for it; if it fails, every rank raises.

    Raises:
        RuntimeError: On every rank, if the action raises on rank 0.

    Communication: one broadcast over the world.
    """
    failure: str | None = None
    if mesh.world.rank == 0:
        try:
            action()
        except (OSError, pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
    failure = broadcast_object(failure, mesh.world_cpu)
    if failure is not None:
        raise RuntimeError(f"{what} failed on rank 0: {failure}")


def discard(path: Path) -> None:
    """Remove what was written of a checkpoint that will not be finished."""
    _remove(unfinished_path(path))


def _readable(path: Path) -> Path:
    # Between the two renames of `publish` the old checkpoint has no name of its own.
    return path if path.exists() or not _replaced_path(path).exists() else _replaced_path(path)


def _replaced_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
