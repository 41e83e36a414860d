"""Saving behind training: one checkpoint at a time is written by a thread, and its failure comes up in training."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_megatron.checkpoint.directory import link_checkpoint, place_of
from lightning_megatron.checkpoint.entries import Entry, boxes_to_write
from lightning_megatron.checkpoint.save import Content, Save, gather_content
from lightning_megatron.checkpoint.staging import HostCopies
from lightning_megatron.checkpoint.together import Caught, describe
from lightning_megatron.checkpoint.values import unsafe_keys
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Save checkpoints, at once or behind training, at most one at a time.

    Every method but :meth:`reserve` and :meth:`hold_updates` is called on all ranks, in the same order.

    Args:
        mesh: The groups of this rank.
        defer_copies: Let training go on while a GPU's tensors are still being copied. The caller promises to call
            :meth:`hold_updates` before it changes a tensor that was given to :meth:`save`.
    """

    def __init__(self, mesh: ParallelMesh, defer_copies: bool = False) -> None:
        self._mesh, self._defer_copies = mesh, defer_copies
        self._copies = HostCopies(mesh.device)
        self._running: _Background | None = None
        self._told: set[str] = set()
        self._foreseen: dict[str, bool] = {}

    @property
    def pending(self) -> str | None:
        """Return the path of the checkpoint that is being written, or whose result is not known yet."""
        return None if self._running is None else os.fspath(self._running.save.path)

    def save(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, Entry],
        metadata: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        background: bool = False,
    ) -> None:
        """Write a checkpoint as :func:`save_checkpoint` does.

        A save that is still being written is waited for first.

        Args:
            path: The directory to create or replace, or a URL for fsspec.
            tensors: This rank's tensors.
            metadata: Picklable values of the job; those of rank 0 are saved.
            rank_state: Picklable values of this rank.
            background: Copy everything to host memory and return; a thread writes it. What happens to the originals
                afterwards does not change what is saved.

        Raises:
            CheckpointSaveError: On all ranks: the failure of this save, or of the one before if it was in the
                background.

        Communication: gathers plans and results over the world, in the background over a group of their own.
        """
        self.wait()
        content: list[Content] = []
        # What fails here on one rank must reach the others, which are going to write: the save tells them.
        with Caught(BaseException) as caught:
            copies = (self._copies.copy, self._copies.wait) if background else ()
            content.append(gather_content(tensors, metadata, rank_state, self._mesh, *copies))
            if self._mesh.world.rank == 0:
                self._warn_of_unsafe(metadata, content[0].metadata)
                self._warn_of_unsafe(rank_state, content[0].rank_state)

        def collected() -> Content:
            if caught.error is not None:
                raise caught.error
            return content[0]

        save = Save(path, self._mesh, collected)
        if not background:
            save.run()
            return
        if not self._defer_copies:
            self.hold_updates()
        self._running, self._foreseen = _Background(save), {_key(path): True}
        self._running.start()
        if caught.error is not None and not isinstance(caught.error, Exception):
            raise caught.error

    def reserve(self, tensors: Mapping[str, Entry]) -> None:
        """Take the host memory that a save of these tensors in the background needs, so that the first waits no longer.

        It does nothing while a save is being written. The tensors of an optimizer are there after its first step.
        """
        if self._running is None:
            self._copies.reserve(boxes_to_write(tensors, self._mesh))

    def hold_updates(self) -> None:
        """Make the GPU wait, before it goes on with what it is told from now on, until tensors are copied."""
        self._copies.hold_updates()

    def poll(self) -> None:
        """Raise the failure of a save in the background, if it is known to all ranks.

        Call it equally often on all ranks, such as after every batch: they raise in the same call.

        Raises:
            CheckpointSaveError: On all ranks.
        """
        if self._running is not None and self._running.is_over():
            self._settle()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointSaveError: On all ranks, the failure of a save that was in the background.
        """
        if self._running is not None:
            self._running.join()
            self._settle()

    def close(self) -> None:
        """Wait until nothing is being written and give memory back.

        Raises:
            CheckpointSaveError: On all ranks, the failure of a save that was in the background.
        """
        try:
            self.wait()
        finally:
            self._copies.free()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, on rank 0; while a save is being written, after its success.

        Until a new checkpoint is complete the old one may be the last: if the save fails, it stays. What cannot be
        removed is warned of: it is no reason to end a training.
        """
        self._change(_Change(path))

    def link(self, path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Let a path lead to a checkpoint, on rank 0; while a save is being written, after its success.

        Until then the path leads to the checkpoint before; what cannot be linked is warned of.

        Args:
            path: The link to make or replace, on a mounted file system.
            target: The checkpoint, perhaps the one that is being written.
        """
        self._change(_Change(path, target))

    def foresees(self, path: str | os.PathLike[str]) -> bool | None:
        """Tell, on every rank alike, whether a path will be there when what is being written is complete.

        Returns:
            None if that changes nothing about the path.
        """
        return self._foreseen.get(_key(path))

    def _change(self, change: _Change) -> None:
        if self._running is not None:
            self._foreseen[_key(change.path)] = change.target is not None
        if self._mesh.world.rank == 0 and not (self._running is not None and self._running.also_make(change)):
            change.make()

    def _settle(self) -> None:
        running, self._running, self._foreseen = self._running, None, {}
        assert running is not None, "a save is settled once"
        if running.failure is not None:
            raise running.failure

    def _warn_of_unsafe(self, values: Mapping[str, Any], data: bytes) -> None:
        for key in unsafe_keys(values, data):
            if key not in self._told:
                self._told.add(key)
                logger.warning(
                    "the checkpoint holds what loading refuses unless it is told otherwise: %s. Save plain values and "
                    "tensors, or load with torch.serialization.add_safe_globals([...]) or weights_only=False.",
                    key,
                )


@dataclass(frozen=True)
class _Change:
    """Hold what is to happen to a path once a newer checkpoint is complete: it is removed, or leads to a target."""

    path: str | os.PathLike[str]
    target: str | os.PathLike[str] | None = None

    def make(self) -> None:
        """Remove or link; warn of what fails."""
        with Caught() as caught:
            if self.target is None:
                place_of(self.path).remove()
            else:
                link_checkpoint(self.path, self.target)
        if caught.error is not None:
            what = "removed" if self.target is None else f"linked to {os.fspath(self.target)}"
            logger.warning("%s could not be %s: %s", os.fspath(self.path), what, describe(caught.error))


@dataclass
class _Background:
    """Run a save in a thread and let all ranks learn of its end in the same call of :meth:`is_over`.

    Ranks are not equally far in training when their threads end. So the threads tell each other how often their ranks
    have asked; all ranks learn of the end when they have asked once more than the one that asked most. A rank that
    asks while the numbers are exchanged waits for that.
    """

    save: Save
    failure: BaseException | None = None
    _asked: int = 0
    _over_at: int | None = None
    _exchanging: bool = False
    _changes: list[_Change] | None = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Start writing."""
        name = f"checkpoint {os.path.basename(os.fspath(self.save.path))}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Tell whether the save has ended, equally on all ranks."""
        with self._changed:
            self._asked += 1
            self._changed.wait_for(lambda: not self._exchanging)
            over = self._over_at is not None and self._asked >= self._over_at
        if over:
            self.join()
        return over

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def also_make(self, change: _Change) -> bool:
        """Have a change made after success; tell whether that is seen to."""
        with self._changed:
            if self._changes is not None:
                self._changes.append(change)
                return True
        if self.failure is not None:
            self._keep(change)
        return self.failure is not None

    def _work(self) -> None:
        if self.save.mesh.device.type == "cuda":
            torch.cuda.set_device(self.save.mesh.device)
        with Caught(BaseException) as caught:
            self.save.run()
        self.failure = caught.error
        if caught.error is not None and not isinstance(caught.error, CheckpointSaveError):
            self.failure = CheckpointSaveError(
                f"all ranks must take part in a save: this one lost the others while saving "
                f"{os.fspath(self.save.path)} ({describe(caught.error)}). The checkpoint is not complete, earlier ones "
                "are as they were. Look for the rank that failed first."
            )
            self.failure.__cause__ = caught.error
        self._make_changes()
        self._agree_on_end()

    def _make_changes(self) -> None:
        with self._changed:
            changes, self._changes = self._changes or [], None
        # What leads to the new checkpoint comes first: what is removed may be what it has led to.
        for change in sorted(changes, key=lambda change: change.target is None):
            if self.failure is not None:
                self._keep(change)
                continue
            change.make()

    def _keep(self, change: _Change) -> None:
        logger.warning(
            "%s is kept as it is, because the save of %s failed", os.fspath(change.path), os.fspath(self.save.path)
        )

    def _agree_on_end(self) -> None:
        axis, most = self.save.mesh.checkpoint_cpu, 0
        # Ranks that are gone will not ask either.
        with Caught():
            all_gather_objects(None, axis)  # until all are here no rank waits in training
            with self._changed:
                self._exchanging, most = True, self._asked
            most = max(all_gather_objects(most, axis))
        with self._changed:
            self._exchanging, self._over_at = False, most + 1
            self._changed.notify_all()


def _key(path: str | os.PathLike[str]) -> str:
    """Spell a path in one way."""
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text else os.path.abspath(text)
