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

from lightning_megatron.checkpoint import list_checkpoints, read_header
from lightning_megatron.checkpoint.collective_steps import run_on_first
from lightning_megatron.errors import CorruptDataError, UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.strategy.checkpoints.source import CheckpointSource

#: Name of the folder that Lightning's loggers create for each run.
_VERSION = re.compile(r"version_\d+")


def find_last(
    trainer: Trainer, mesh: ParallelMesh, weights_only: bool | None
) -> CheckpointSource | None:
    """Find the newest complete checkpoint of a run; all ranks share the verification.

    Checkpoints of any name count. Lightning considers only names that begin with "last", so that a
    run without ``save_last`` would start again after a crash. The newest checkpoint is the one that
    was saved last, even if another one has more steps: a run may have returned to an earlier step.
    Numbers in the headers give the order, because clocks of hosts may differ.
    ``fit`` skips checkpoints that contain only weights.

    Returns:
        The checkpoint; None if none exists.

    Communication: broadcasts and gathers over the world.
    """
    trains = trainer.state.fn == TrainerFn.FITTING
    folders, sources = run_on_first(
        lambda: (list(checkpoint_folders(trainer)), list(_newest_first(trainer))), mesh.world_cpu
    )
    damages = []
    for source in sources:
        try:
            source.verify(mesh)
            if trains and not source.has_optimizers(weights_only, mesh):
                continue
        except CorruptDataError as error:
            damages.append(str(error))
            rank_zero_warn(f"ckpt_path='last' skips the newest checkpoint: {error}")
        else:
            rank_zero_info(f"ckpt_path='last' is {source.path}")
            return source
    if damages:
        raise CorruptDataError(
            f"ckpt_path='last' needs an undamaged checkpoint: all {len(damages)} in "
            f"{', '.join(folders)} are damaged. The error of the newest one: {damages[0]} Pass the "
            "path of one to try to load it, or ckpt_path=None to start from the beginning."
        )
    rank_zero_warn(
        f"ckpt_path='last' finds no complete checkpoint in {', '.join(folders) or 'any folder'}: "
        "weights keep their values, and a fit begins at its first step."
    )
    return None


def checkpoint_folders(trainer: Trainer) -> Iterator[str]:
    """Return the checkpoint folders of a run's callbacks.

    Without callbacks this is the Trainer's ``default_root_dir``, into which a job saves when a
    scheduler stops it. A logger may create a new folder for every run, such as ``version_0`` and
    ``version_1``. The folders of earlier runs are then included, because a restarted run has a new
    folder.
    """
    folders = [
        callback.dirpath
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    folders += [
        callback.dirpath
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, OnExceptionCheckpoint)
    ]
    known = [os.fspath(dirpath) for dirpath in folders if dirpath is not None]
    yielded: set[str] = set()
    for folder in known or [os.fspath(trainer.default_root_dir)]:
        siblings = []
        if "://" not in folder and _VERSION.fullmatch(Path(folder).parent.name):
            root = Path(folder).parent.parent
            inner = Path(folder).name
            siblings = [
                str(version / inner)
                for version in root.glob("version_*")
                if _VERSION.fullmatch(version.name)
            ]
        for path in (folder, *sorted(siblings)):
            if os.path.normpath(path) not in yielded:
                yielded.add(os.path.normpath(path))
                yield path


def _newest_first(trainer: Trainer) -> Iterator[CheckpointSource]:
    """Yield the checkpoints of a run, newest first, without duplicates.

    A checkpoint without a number follows all numbered ones whose times are not later. Of a link and
    its target, only the target is yielded.
    """
    found = list(_checkpoints_in(checkpoint_folders(trainer)))
    checkpoints = []
    for number, time, source in found:
        before = (known for known, at, _ in found if at <= time)
        place = number or max(before)
        checkpoints.append((place, time, not os.path.islink(source.path), source.path, source))
    yielded = set()
    for *_, path, source in sorted(checkpoints, key=lambda entry: entry[:4], reverse=True):
        real = path if "://" in path else os.path.realpath(path)
        if real not in yielded:
            yielded.add(real)
            yield source


def _checkpoints_in(folders: Iterable[str]) -> Iterator[tuple[int, float, CheckpointSource]]:
    """Yield the number and time of saving of every checkpoint, and the checkpoint.

    The number of a file, of a damaged checkpoint and of one without a number is 0.
    """
    for folder in folders:
        for path in list_checkpoints(folder):
            source = CheckpointSource(path, is_single_file=False)
            try:
                header = read_header(path)
                yield header.save_number, header.saved_at, source
            except (CorruptDataError, UnsupportedError):
                # The time of saving cannot be read from a damaged header. The directory's time of
                # modification is close to it.
                yield 0, os.path.getmtime(path) if os.path.exists(path) else 0.0, source
        if "://" not in folder:
            files = (str(file) for file in Path(folder).glob("*.ckpt") if file.is_file())
            yield from (
                (0, os.path.getmtime(file), CheckpointSource(file, is_single_file=True))
                for file in files
            )
