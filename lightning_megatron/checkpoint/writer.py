"""Checkpoint writer that saves in the foreground or in a background thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_megatron.checkpoint.collective_steps import CaughtError, describe
from lightning_megatron.checkpoint.directory import (
    checkpoint_path_of,
    folder_of,
    link_checkpoint,
    next_save_number,
)
from lightning_megatron.checkpoint.entries import Entry, boxes_to_write
from lightning_megatron.checkpoint.header import Header
from lightning_megatron.checkpoint.save import CollectiveSave, RankSnapshot
from lightning_megatron.checkpoint.staging import HostCopies
from lightning_megatron.checkpoint.values import to_bytes, unsafe_keys
from lightning_megatron.errors import CheckpointSaveError
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writer of checkpoints in the foreground or background, one at a time.

    All ranks must call all methods in the same order, except :meth:`reserve` and
    :meth:`wait_for_snapshot`.

    Args:
        defer_copies: Whether :meth:`save` may return before a GPU's tensors are copied. The
            caller must then call :meth:`wait_for_snapshot` before it changes a tensor given to
            :meth:`save`.
    """

    def __init__(self, mesh: ParallelMesh, defer_copies: bool = False) -> None:
        self._mesh = mesh
        self._defer_copies = defer_copies
        self._copies = HostCopies(mesh.device)
        self._running: _Background | None = None
        self._warned_keys: set[str] = set()
        self._last_number: int | None = None
        # For each path that the background save changes: whether it will exist after the save.
        self._will_exist: dict[str, bool] = {}

    @property
    def pending(self) -> str | None:
        """Return the path of the background save whose result is not known yet, if there is one."""
        return None if self._running is None else os.fspath(self._running.save.path)

    def save(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, Entry],
        metadata: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        background: bool = False,
        folders: Iterable[str] = (),
    ) -> None:
        """Write a checkpoint that any layout can load, after the previous save has ended.

        Every full tensor becomes one entry without padding. Replicas and tied copies are omitted,
        and each data-parallel rank writes some of the pieces. The checkpoint appears at ``path``
        only after all ranks have written and verified their files, and an older checkpoint at
        ``path`` remains until then.

        Args:
            tensors: Entries of this rank by names that do not depend on the layout. Ranks of
                different tp or pp rank may have different entries. Entries that are not exclusive
                must be the same, in the same order, on all data-parallel ranks with the same tp and
                pp rank.
            folders: Folders of older checkpoints of the run, apart from that of ``path``; the first
                save reads their headers on the first rank.

        Raises:
            CheckpointSaveError: On all ranks, for a failure of this save or of a previous save in
                the background.

        Communication: gathers plans and results over the world, in a separate process group.
        """
        self.wait()
        content: RankSnapshot | BaseException | None = None
        # An error on this rank must reach the other ranks, which are about to write.
        with CaughtError(BaseException) as caught:
            number = partial(self._next_number, {folder_of(path), *folders})
            content = self._snapshot(tensors, metadata, rank_state, number, background)
        content = caught.error or content
        assert content is not None, "a snapshot or its error"
        # Only `wait` above and the save itself communicate. Every rank enters both, even if an
        # error left it without data, so that no rank waits for another forever.
        save = CollectiveSave(path, self._mesh, content)
        if not background:
            save.run()
            return
        # The copies to the host may not be complete. Unless the caller waits for them before it
        # changes a tensor, wait here.
        if not self._defer_copies:
            self.wait_for_snapshot()
        self._running = _Background(save)
        # From now on `will_exist` reports the path, although the thread publishes it later.
        self._will_exist = {_key(path): True}
        self._running.start()
        # The thread reports any error to the other ranks. An interrupt must also end this rank's
        # training now, instead of at the next `poll`.
        if caught.error is not None and not isinstance(caught.error, Exception):
            raise caught.error

    def _snapshot(
        self,
        tensors: Mapping[str, Entry],
        metadata: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        number: Callable[[], int],
        background: bool,
    ) -> RankSnapshot:
        """Collect the data that this rank writes, and warn of values that load unsafely."""
        pieces = boxes_to_write(tensors, self._mesh)
        if background:
            pieces = self._copies.copy(pieces)
        state = to_bytes(dict(rank_state))
        values = b""
        header = Header(
            self._mesh.layout,
            torch.__version__,
            global_step=_number(metadata.get("global_step")),
            epoch=_number(metadata.get("epoch")),
            saved_at=round(time.time(), 3),
        )
        if self._mesh.world.rank == 0:
            values = to_bytes(dict(metadata))
            header = replace(header, save_number=number())
            self._warn_of_unsafe(metadata, values)
            self._warn_of_unsafe(rank_state, state)
        ready = self._copies.wait if background else lambda: None
        return RankSnapshot(pieces, state, values, header, ready)

    def _next_number(self, folders: Iterable[str]) -> int:
        if self._last_number is None:
            self._last_number = next_save_number(folders) - 1
        self._last_number += 1
        return self._last_number

    def reserve(self, tensors: Mapping[str, Entry]) -> None:
        """Allocate the host memory for a background save of these tensors before the first save.

        Do nothing during a save. Call this method after the first optimizer step, which creates
        the state of the optimizer.
        """
        if self._running is None:
            self._copies.reserve(boxes_to_write(tensors, self._mesh))

    def wait_for_snapshot(self) -> None:
        """Make later GPU work wait until the tensors of a save have been read."""
        self._copies.wait_for_snapshot()

    def poll(self) -> None:
        """Raise the error of a failed background save once all ranks know of it.

        All ranks must call this method the same number of times, such as after every batch. They
        raise in the same call.

        Raises:
            CheckpointSaveError: On all ranks.
        """
        if self._running is not None and self._running.is_over():
            self._finish_change()

    def wait(self) -> None:
        """Wait until a background save has ended.

        Raises:
            CheckpointSaveError: On all ranks, if the background save failed.
        """
        if self._running is not None:
            self._running.join()
            self._finish_change()

    def close(self) -> None:
        """Wait until a background save has ended, and release the host memory.

        Raises:
            CheckpointSaveError: On all ranks, if the background save failed.
        """
        try:
            self.wait()
        finally:
            self._copies.free()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint on rank 0; during a background save, only after the save succeeds.

        Until the new checkpoint is complete, the old one may be the only one, so it stays if the
        save fails. A failure to remove it is logged as a warning and does not end training.
        """
        self._change(_DeferredChange(path))

    def link(self, path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Link a path to a checkpoint on rank 0; during a background save, only after it succeeds.

        Until then the path keeps its previous target. Failure to link is logged as a warning.
        """
        self._change(_DeferredChange(path, target))

    def will_exist(self, path: str | os.PathLike[str]) -> bool | None:
        """Return whether a path will exist after the background save; the same on all ranks.

        Returns:
            None if the background save does not change the path
        """
        return self._will_exist.get(_key(path))

    def _change(self, change: _DeferredChange) -> None:
        if self._running is not None:
            self._will_exist[_key(change.path)] = change.target is not None
        if self._mesh.world.rank == 0 and not (
            self._running is not None and self._running.defer(change)
        ):
            change.make()

    def _finish_change(self) -> None:
        running = self._running
        self._running = None
        self._will_exist = {}
        assert running is not None, "a save is settled once"
        if running.failure is not None:
            raise running.failure

    def _warn_of_unsafe(self, values: Mapping[str, Any], data: bytes) -> None:
        for key in unsafe_keys(values, data):
            if key not in self._warned_keys:
                self._warned_keys.add(key)
                logger.warning(
                    "the checkpoint holds values that loading refuses by default: %s. Save plain "
                    "values and tensors, or load with torch.serialization.add_safe_globals([...]) "
                    "or weights_only=False.",
                    key,
                )


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Entry],
    metadata: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    mesh: ParallelMesh,
) -> None:
    """Write a checkpoint as :meth:`CheckpointWriter.save` does; return when it is complete.

    Raises:
        CheckpointSaveError: On all ranks, if any rank cannot write.

    Communication: gathers plans and results over the world; call it on all ranks.
    """
    CheckpointWriter(mesh).save(path, tensors, metadata, rank_state)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class _DeferredChange:
    """Removal or link of a path that is applied when a newer checkpoint is complete."""

    path: str | os.PathLike[str]
    target: str | os.PathLike[str] | None = None

    def make(self) -> None:
        """Remove or link the path; log a failure as a warning."""
        with CaughtError() as caught:
            if self.target is None:
                checkpoint_path_of(self.path).remove()
            else:
                link_checkpoint(self.path, self.target)
        if caught.error is not None:
            what = "removed" if self.target is None else f"linked to {os.fspath(self.target)}"
            logger.warning(
                "%s could not be %s: %s", os.fspath(self.path), what, describe(caught.error)
            )


@dataclass
class _Background:
    """Save in a thread. All ranks see its end in the same call of :meth:`is_over`.

    Ranks reach different points of training before their threads end. The threads therefore gather
    the number of calls on each rank. :meth:`is_over` returns True from the call after the largest
    of these numbers. A call during the gather blocks until it is done.
    """

    save: CollectiveSave
    failure: BaseException | None = None
    _num_queries: int = 0
    _over_at: int | None = None
    _exchanging: bool = False
    _changes: list[_DeferredChange] | None = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Start the thread."""
        name = f"checkpoint {os.path.basename(os.fspath(self.save.path))}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Return whether the save has ended; the n-th call returns the same on all ranks."""
        with self._changed:
            self._num_queries += 1
            self._changed.wait_for(lambda: not self._exchanging)
            has_ended = self._over_at is not None and self._num_queries >= self._over_at
        if has_ended:
            self.join()
        return has_ended

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def defer(self, change: _DeferredChange) -> bool:
        """Apply a change after the save succeeds; return False if the caller must apply it now."""
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
        with CaughtError(BaseException) as caught:
            self.save.run()
        self.failure = caught.error
        if caught.error is not None and not isinstance(caught.error, CheckpointSaveError):
            self.failure = CheckpointSaveError(
                "all ranks must take part in a save: this rank lost the others while saving "
                f"{os.fspath(self.save.path)} ({describe(caught.error)}). The checkpoint is not "
                "complete; earlier checkpoints are unchanged. Look for the rank that failed first."
            )
            self.failure.__cause__ = caught.error
        self._make_changes()
        self._agree_on_end()

    def _make_changes(self) -> None:
        with self._changed:
            changes = self._changes or []
            self._changes = None
        # Links come first: a removed checkpoint may be the previous target of a link.
        for change in sorted(changes, key=lambda change: change.target is None):
            if self.failure is not None:
                self._keep(change)
                continue
            change.make()

    def _keep(self, change: _DeferredChange) -> None:
        logger.warning(
            "%s is kept, because the save of %s failed",
            os.fspath(change.path),
            os.fspath(self.save.path),
        )

    def _agree_on_end(self) -> None:
        axis = self.save.mesh.checkpoint_cpu
        num_calls = 0
        # Ignore failures: a rank that has exited makes no further calls.
        with CaughtError():
            # Wait for all threads before `_exchanging` blocks calls of `is_over` in training.
            all_gather_objects(None, axis)
            with self._changed:
                self._exchanging = True
                num_calls = self._num_queries
            num_calls = max(all_gather_objects(num_calls, axis))
        with self._changed:
            self._exchanging = False
            self._over_at = num_calls + 1
            self._changed.notify_all()


def _key(path: str | os.PathLike[str]) -> str:
    """Return a normalized form of a path, as a key."""
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text else os.path.abspath(text)
