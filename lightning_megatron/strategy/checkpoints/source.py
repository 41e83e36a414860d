"""Source of a load: a directory or a file, at a path or the newest of a run; and the error of
``load_from_checkpoint`` for directories.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import (
    is_sharded_checkpoint,
    list_checkpoints,
    load_metadata,
    read_header,
    verify_checkpoint,
)
from lightning_megatron.checkpoint.collective_steps import run_on_first, verify_together
from lightning_megatron.checkpoint.consolidate import OPTIMIZERS
from lightning_megatron.checkpoint.values import read_single_file, verify_single_file
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError
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
                "--weights_only` and load that file, or pass the directory as ckpt_path to fit, "
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
        for kind in (ModelCheckpoint, OnExceptionCheckpoint)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, kind)
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
