"""Search for the newest complete checkpoint of a run, for ``ckpt_path="last"``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import list_checkpoints, load_metadata, read_header, verify_checkpoint
from lightning_megatron.checkpoint.consolidate import OPTIMIZERS
from lightning_megatron.checkpoint.plain_file import read_file, verify_file
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.groups.collectives import broadcast_object
from lightning_megatron.groups.mesh import ParallelMesh

#: The folder that loggers of Lightning make for each run of one name.
_VERSION = re.compile(r"version_\d+")


def find_last(trainer: Trainer, mesh: ParallelMesh, weights_only: bool | None) -> str | None:
    """Find the newest complete checkpoint of a run; all ranks share the verification.

    Every checkpoint counts, of any name: Lightning looks at names that begin with "last" alone, so that a run without
    ``save_last`` would begin anew after a crash. The newest is that which was saved last, not that of the most steps: a
    training that went back to an earlier step goes on from there. A training passes over those of weights alone.

    Args:
        trainer: The trainer, whose callbacks and loggers know their folders.
        mesh: The groups of this rank.
        weights_only: As for loading.

    Returns:
        None if there is none.

    Raises:
        CorruptDataError: If there are checkpoints and all of them are damaged: beginning anew would replace them.

    Communication: broadcasts and gathers over the world.
    """
    trains = trainer.state.fn == TrainerFn.FITTING
    found = (list(checkpoint_folders(trainer)), list(_newest_first(trainer))) if mesh.rank == 0 else None
    folders, paths = broadcast_object(found, mesh.world_cpu)
    damages = []
    for path in paths:
        try:
            verify_any(path, mesh)
            if trains and not _has_optimizers(path, weights_only):
                continue
        except CorruptDataError as error:
            damages.append(str(error))
            rank_zero_warn(f"ckpt_path='last' passes over the newest checkpoint: {error}")
        else:
            rank_zero_info(f"ckpt_path='last' is {path}")
            return str(path)
    if damages:
        raise CorruptDataError(
            f"ckpt_path='last' needs one whole checkpoint: all {len(damages)} in {', '.join(folders)} are damaged. "
            f"The newest: {damages[0]} Name one to try it, or give ckpt_path=None to begin anew."
        )
    rank_zero_warn(
        f"ckpt_path='last' finds no complete checkpoint in {', '.join(folders) or 'any folder'}: weights stay as they "
        "are, and a fit begins at its first step."
    )
    return None


def checkpoint_folders(trainer: Trainer) -> Iterator[str]:
    """Return the checkpoint folders of a run's callbacks.

    Without callbacks it is the folder of the trainer, where a job that is told to end leaves its checkpoint. Where a
    logger gives every run a new folder, ``version_0``, ``version_1`` and so on, those of earlier runs count as
    well: a run that was restarted gets a new one.
    """
    given = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    given += [
        callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, OnExceptionCheckpoint)
    ]
    known = [os.fspath(one) for one in given if one is not None]
    seen: set[str] = set()
    for folder in known or [os.fspath(trainer.default_root_dir)]:
        siblings = []
        if "://" not in folder and _VERSION.fullmatch(Path(folder).parent.name):
            root, inner = Path(folder).parent.parent, Path(folder).name
            siblings = [str(one / inner) for one in root.glob("version_*") if _VERSION.fullmatch(one.name)]
        for one in (folder, *sorted(siblings)):
            if os.path.normpath(one) not in seen:
                seen.add(os.path.normpath(one))
                yield one


def _newest_first(trainer: Trainer) -> Iterator[str]:
    """Return the checkpoints of a run, newest first, without duplicates; links follow targets."""
    seen = set()
    found = [(time, not os.path.islink(path), path) for time, path in _found_in(checkpoint_folders(trainer))]
    for _, _, path in sorted(found, reverse=True):
        real = path if "://" in path else os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield path


def _found_in(folders: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Yield (time of saving, path) of every checkpoint, including files of other strategies."""
    for folder in folders:
        for path in list_checkpoints(folder):
            try:
                yield read_header(path).saved_at, path
            except (CorruptDataError, UnsupportedError):
                # A damaged header does not say when; the directory does, about.
                yield os.path.getmtime(path) if os.path.exists(path) else 0.0, path
        if "://" not in folder:
            files = (str(file) for file in Path(folder).glob("*.ckpt") if file.is_file())
            yield from ((os.path.getmtime(file), file) for file in files)


def verify_any(path: str, mesh: ParallelMesh) -> None:
    """Verify the checksums of a checkpoint directory, or of a file on a mounted file system.

    Raises:
        CorruptDataError: On all ranks, naming the file that is damaged.

    Communication: collective over all ranks.
    """
    if not os.path.isfile(path):
        verify_checkpoint(path, mesh=mesh)
        return
    error: CorruptDataError | None = None
    if mesh.rank == 0:
        try:
            verify_file(path)
        except CorruptDataError as caught:
            error = caught
    error = broadcast_object(error, mesh.world_cpu)
    if error is not None:
        raise error


def _has_optimizers(path: str, weights_only: bool | None) -> bool:
    if os.path.isfile(path):
        return "optimizer_states" in read_file(path, weights_only)
    return OPTIMIZERS in load_metadata(path, weights_only)
