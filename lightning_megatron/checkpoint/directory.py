"""Atomic creation, replacement and removal of checkpoint directories.

On a mounted file system, a checkpoint is written to a sibling directory, which is then renamed. A
directory behind a URL cannot be renamed atomically. Its files are therefore written to a new
subfolder of the checkpoint, and the header, which is written last, names the subfolder.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from lightning_megatron.checkpoint.header import HEADER, Header
from lightning_megatron.checkpoint.storage import (
    Folder,
    LocalFolder,
    RemoteFolder,
    folder_at,
    is_url,
    remove_path,
)
from lightning_megatron.disk_sync import sync_folder
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError

logger = logging.getLogger(__name__)

_UNFINISHED = "unfinished"
_REPLACED = "replaced"
_REMOVED = "removed"
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<kind>{_UNFINISHED}|{_REPLACED}|{_REMOVED})")
_REMOTE = re.compile(r"save-[0-9a-f]{16}")
_NEW_HEADER = f"{HEADER}.new"


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint that is ready to be read."""

    path: str
    header: Header
    folder: Folder

    def file(self, name: str) -> str:
        """Return the path of a file, for error messages."""
        return f"{self.folder.name}/{name}"


@dataclass(frozen=True)
class LocalCheckpointPath:
    """Path on a mounted file system; the directory ``.NAME.unfinished`` is filled and renamed."""

    path: Path

    def begin(self) -> str:
        """Remove leftovers of interrupted saves; create an empty folder and return its token."""
        clean_unfinished(self.path.parent)
        unfinished_path(self.path).mkdir(parents=True)
        return _UNFINISHED

    def folder(self, token: str) -> Folder:
        """Return the folder to which all ranks write."""
        return LocalFolder(unfinished_path(self.path))

    def publish(self, token: str, header: Header) -> None:
        """Write the header and rename the directory, which replaces an existing checkpoint.

        If the process dies between the two renames, the old checkpoint remains under a hidden name,
        under which :func:`find_checkpoint` still finds it.
        """
        unfinished = unfinished_path(self.path)
        replaced = _hidden(self.path, _REPLACED)
        header.write(LocalFolder(unfinished))
        sync_folder(unfinished)
        # `lexists` is also true for a dangling link, which would prevent the rename.
        if os.path.lexists(self.path):
            remove_path(replaced)
            self.path.rename(replaced)
        unfinished.rename(self.path)
        sync_folder(self.path.parent)
        # The new checkpoint is complete. Failure to remove the old one, for example while another
        # process reads it, is not a failure of the save.
        _remove_leftover(replaced)

    def discard(self, token: str | None) -> None:
        """Remove the files of an unfinished checkpoint; None if ``begin`` did not return."""
        if token is not None:
            remove_path(unfinished_path(self.path))

    def remove(self) -> None:
        """Rename the checkpoint to a hidden name, then remove its files."""
        replaced = _hidden(self.path, _REPLACED)
        removed = _hidden(self.path, _REMOVED)
        remove_path(replaced)
        if self.path.is_symlink() or not self.path.is_dir():
            self.path.unlink(missing_ok=True)
            return
        remove_path(removed)
        self.path.rename(removed)
        remove_path(removed)


@dataclass(frozen=True)
class RemoteCheckpointPath:
    """Path behind a URL; ``URL/checkpoint.json`` names the folder ``URL/save-...`` of the files."""

    url: str

    @property
    def _root(self) -> RemoteFolder:
        return RemoteFolder(self.url)

    def begin(self) -> str:
        """Remove leftovers of interrupted saves; create an empty folder and return its token."""
        _clean_remote(self._root)
        token = f"save-{secrets.token_hex(8)}"
        self.folder(token).make()
        return token

    def folder(self, token: str) -> RemoteFolder:
        """Return the folder to which all ranks write."""
        return self._root.child(token)

    def publish(self, token: str, header: Header) -> None:
        """Replace the header by one that names the new folder, then remove the old folder."""
        root = self._root
        replace(header, folder=token).write(root, _NEW_HEADER)
        root.move(_NEW_HEADER, HEADER)
        _clean_remote(root)

    def discard(self, token: str | None) -> None:
        """Remove the files of an unfinished checkpoint; None if ``begin`` did not return."""
        if token is not None:
            self._root.remove(token)
            if not self._root.names():
                self._remove_root()

    def remove(self) -> None:
        """Remove the header, which hides the checkpoint from readers, and then the files."""
        self._root.remove(HEADER)
        self._remove_root()

    def _remove_root(self) -> None:
        parent, _, name = self.url.rpartition("/")
        RemoteFolder(parent).remove(name)


#: Path of a checkpoint, with the steps of a save. One rank calls all methods; the other ranks call
#: only ``folder``.
CheckpointPath: TypeAlias = LocalCheckpointPath | RemoteCheckpointPath


def checkpoint_path_of(path: str | os.PathLike[str]) -> CheckpointPath:
    """Return the object that writes a checkpoint to a path or URL."""
    if is_url(path):
        return RemoteCheckpointPath(os.fspath(path).rstrip("/"))
    return LocalCheckpointPath(Path(path))


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a complete checkpoint of this library; files are not verified."""
    return _readable(path).exists(HEADER)


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at ``path`` for reading."""
    root = _readable(path)
    if not root.exists(HEADER):
        raise CheckpointMismatchError(
            f"a sharded checkpoint must be a directory with {HEADER}: {os.fspath(path)!r} is not. "
            f"An interrupted save leaves no {HEADER}. Pass the directory that save_checkpoint "
            "wrote."
        )
    header = Header.read(root)
    if header.folder == ".":
        return Checkpoint(os.fspath(path), header, root)
    if not _REMOTE.fullmatch(header.folder):
        raise CorruptDataError(
            "the files of a checkpoint must be in a folder that a save created: "
            f"{root.name}/{HEADER} names {header.folder!r}. Another name could lead out of the "
            "checkpoint. Use another checkpoint."
        )
    return Checkpoint(os.fspath(path), header, root.child(header.folder))


def link_checkpoint(link: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Create or replace a symbolic link to a checkpoint on a mounted file system.

    Args:
        link: Path of the link. A link or file there is replaced atomically; a directory is removed
            first.
    """
    path = Path(link)
    new = unfinished_path(path)
    remove_path(new)
    new.symlink_to(os.path.relpath(target, path.parent))
    if path.is_dir() and not path.is_symlink():
        LocalCheckpointPath(path).remove()
    new.replace(path)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the complete checkpoints directly in a folder, sorted by name."""
    inside = folder_at(folder)
    names = set(inside.names())
    # Between the two renames of `publish`, the old checkpoint exists only under its hidden name.
    hidden = (_HIDDEN.fullmatch(name) for name in names)
    names |= {match["name"] for match in hidden if match is not None and match["kind"] == _REPLACED}
    paths = (
        f"{inside.name.rstrip('/')}/{name}" for name in sorted(names) if not _HIDDEN.fullmatch(name)
    )
    return [path for path in paths if is_sharded_checkpoint(path)]


def next_save_number(folders: Iterable[str | os.PathLike[str]]) -> int:
    """Return a number for the next save, larger than those of all checkpoints in some folders.

    Args:
        folders: Folders or fsspec URLs; damaged checkpoints inside do not count.
    """
    largest = 0
    for folder in folders:
        for path in list_checkpoints(folder):
            with suppress(CheckpointMismatchError, CorruptDataError, UnsupportedError):
                largest = max(largest, find_checkpoint(path).header.save_number)
    return largest + 1


def folder_of(path: str | os.PathLike[str]) -> str:
    """Return the folder or URL that holds a checkpoint."""
    if is_url(path):
        return os.fspath(path).rstrip("/").rpartition("/")[0]
    return os.path.dirname(os.path.abspath(path))


def clean_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove the leftovers of interrupted saves and removals from a folder.

    If a process died while it replaced a checkpoint, the old checkpoint gets its name back.
    Failure to remove a path is logged as a warning. Do not call this function during a save into
    the same folder.
    """
    if is_url(folder):
        inside = RemoteFolder(os.fspath(folder).rstrip("/"))
        for name in inside.names():
            _clean_remote(inside.child(name))
        return
    for name in LocalFolder(Path(folder)).names():
        match = _HIDDEN.fullmatch(name)
        path = Path(folder) / name
        if match is None or not (path.is_dir() or match["kind"] == _REPLACED):
            continue
        if match["kind"] == _REPLACED and not os.path.lexists(Path(folder) / match["name"]):
            path.rename(Path(folder) / match["name"])
            continue
        if _remove_leftover(path):
            logger.info("removed %s, which an interrupted save left", path)


def unfinished_path(path: Path) -> Path:
    """Return the sibling directory to which a checkpoint is written before it is renamed."""
    return _hidden(path, _UNFINISHED)


def _readable(path: str | os.PathLike[str]) -> Folder:
    if is_url(path):
        return folder_at(path)
    local = Path(path)
    replaced = _hidden(local, _REPLACED)
    return LocalFolder(local if local.exists() or not replaced.exists() else replaced)


def _remove_leftover(path: Path) -> bool:
    """Remove a leftover path; log a warning and return False on failure. The next save retries."""
    try:
        remove_path(path)
    except OSError as error:
        logger.warning("%s could not be removed; the next save tries again: %s", path, error)
        return False
    return True


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _clean_remote(root: RemoteFolder) -> None:
    """Remove the folders of saves that the header does not name."""
    folders = [name for name in root.names() if _REMOTE.fullmatch(name)]
    try:
        kept = Header.read(root).folder if folders and root.exists(HEADER) else None
    except (CorruptDataError, UnsupportedError):
        return  # a damaged header may refer to any of the folders
    for name in folders:
        if name != kept:
            root.remove(name)
            logger.info("removed %s/%s, which an interrupted save left", root.name, name)
