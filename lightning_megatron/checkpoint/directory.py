"""Where checkpoints are: complete under their name, or not there at all.

On a mounted file system a checkpoint is written beside its place and renamed. Behind a URL nothing can be renamed as a
whole: there the files go to a folder of their own inside the checkpoint's, and the header, written last, names it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lightning_megatron.checkpoint.header import HEADER, Header
from lightning_megatron.checkpoint.storage import (
    Folder,
    LocalFolder,
    RemoteFolder,
    folder_at,
    is_url,
    remove_path,
    sync_folder,
)
from lightning_megatron.errors import CheckpointMismatchError, CorruptDataError, UnsupportedError

logger = logging.getLogger(__name__)

_UNFINISHED, _REPLACED, _REMOVED = "unfinished", "replaced", "removed"
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<kind>{_UNFINISHED}|{_REPLACED}|{_REMOVED})")
_REMOTE = re.compile(r"save-[0-9a-f]{16}")
_NEW_HEADER = f"{HEADER}.new"


@dataclass(frozen=True)
class Checkpoint:
    """Hold a complete checkpoint that is about to be read.

    Args:
        path: Its path or URL.
        header: Its marker.
        folder: Where its files are.
    """

    path: str
    header: Header
    folder: Folder

    def file(self, name: str) -> str:
        """Return the path of one file, for messages."""
        return f"{self.folder.name}/{name}"


class Place(Protocol):
    """Name the steps by which a checkpoint gets to its place; all but ``folder`` are for one rank to take."""

    def begin(self) -> str:
        """Make room for a new checkpoint and return the name by which all ranks find it."""

    def folder(self, token: str) -> Folder:
        """Return the folder that the files are written to."""

    def publish(self, token: str, header: Header) -> None:
        """Make the checkpoint visible, replacing what is there."""

    def discard(self, token: str | None) -> None:
        """Remove what was written of a checkpoint that will not be finished; nothing where it was not begun."""

    def remove(self) -> None:
        """Remove the checkpoint, or whatever is there; it is never seen in part."""


@dataclass(frozen=True)
class LocalPlace:
    """A checkpoint on a mounted file system: written to ``.NAME.unfinished`` and renamed."""

    path: Path

    def begin(self) -> str:
        """Remove what interrupted saves left in the parent folder and create an empty directory."""
        clean_unfinished(self.path.parent)
        unfinished_path(self.path).mkdir(parents=True)
        return _UNFINISHED

    def folder(self, token: str) -> Folder:
        """Return the folder that the files are written to."""
        return LocalFolder(unfinished_path(self.path))

    def publish(self, token: str, header: Header) -> None:
        """Write the header and give the directory its name, replacing what has that name now.

        A process that dies in between leaves the old checkpoint under a hidden name, where it is still found.
        """
        unfinished, replaced = unfinished_path(self.path), _hidden(self.path, _REPLACED)
        header.write(LocalFolder(unfinished))
        sync_folder(unfinished)
        # A link whose checkpoint is gone is in the way as well.
        if os.path.lexists(self.path):
            remove_path(replaced)
            self.path.rename(replaced)
        unfinished.rename(self.path)
        sync_folder(self.path.parent)
        # The new checkpoint is there: what cannot be removed now, such as files that others read, is no failure of it.
        _remove_leftover(replaced)

    def discard(self, token: str | None) -> None:
        """Remove what was written of a checkpoint that will not be finished."""
        if token is not None:
            remove_path(unfinished_path(self.path))

    def remove(self) -> None:
        """Rename the checkpoint away, then remove its files."""
        replaced, removed = _hidden(self.path, _REPLACED), _hidden(self.path, _REMOVED)
        remove_path(replaced)
        if self.path.is_symlink() or not self.path.is_dir():
            self.path.unlink(missing_ok=True)
            return
        remove_path(removed)
        self.path.rename(removed)
        remove_path(removed)


@dataclass(frozen=True)
class RemotePlace:
    """A checkpoint behind a URL: its files in ``URL/save-...``, which the header ``URL/checkpoint.json`` names."""

    url: str

    @property
    def _root(self) -> Folder:
        return RemoteFolder(self.url)

    def begin(self) -> str:
        """Remove what interrupted saves left here and create an empty folder."""
        _clean_remote(self._root)
        token = f"save-{secrets.token_hex(8)}"
        self.folder(token).make()
        return token

    def folder(self, token: str) -> Folder:
        """Return the folder that the files are written to."""
        return self._root.child(token)

    def publish(self, token: str, header: Header) -> None:
        """Write the header, which makes the new files the checkpoint's, then remove the old ones."""
        root = self._root
        replace(header, folder=token).write(root, _NEW_HEADER)
        root.move(_NEW_HEADER, HEADER)
        _clean_remote(root)

    def discard(self, token: str | None) -> None:
        """Remove what was written of a checkpoint that will not be finished."""
        if token is None:
            return
        self._root.remove(token)
        if not self._root.names():
            folder_at(self.url.rsplit("/", 1)[0]).remove(self.url.rsplit("/", 1)[1])

    def remove(self) -> None:
        """Remove the header, so that nothing is left to see, then the files."""
        self._root.remove(HEADER)
        folder_at(self.url.rsplit("/", 1)[0]).remove(self.url.rsplit("/", 1)[1])


def place_of(path: str | os.PathLike[str]) -> Place:
    """Return the place of a checkpoint, on a mounted file system or behind a URL."""
    return RemotePlace(os.fspath(path).rstrip("/")) if is_url(path) else LocalPlace(Path(path))


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether ``path`` is a complete checkpoint of this library; whether it is damaged, verifying tells."""
    return _readable(path).exists(HEADER)


def find_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint ``path`` for reading.

    Raises:
        CheckpointMismatchError: If there is no complete checkpoint.
        CorruptDataError: If its header is damaged.
        UnsupportedError: If it has another format.
    """
    root = _readable(path)
    if not root.exists(HEADER):
        raise CheckpointMismatchError(
            f"a sharded checkpoint must be a directory with {HEADER}: {os.fspath(path)!r} is not. One that was "
            "interrupted while saving is never complete. Pass the directory that save_checkpoint wrote."
        )
    header = Header.read(root)
    if header.folder == ".":
        return Checkpoint(os.fspath(path), header, root)
    if not _REMOTE.fullmatch(header.folder):
        raise CorruptDataError(
            f"the files of a checkpoint must be in a folder that saving made: {root.name}/{HEADER} names "
            f"{header.folder!r}. Others could be anywhere. Use another checkpoint."
        )
    return Checkpoint(os.fspath(path), header, root.child(header.folder))


def link_checkpoint(link: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Let a path on a mounted file system lead to a checkpoint, in place of what it is now.

    Args:
        link: The path; a checkpoint that is there is removed, a link or file is replaced without a moment between.
        target: The checkpoint.
    """
    place = Path(link)
    new = unfinished_path(place)
    remove_path(new)
    new.symlink_to(os.path.relpath(target, place.parent))
    if place.is_dir() and not place.is_symlink():
        LocalPlace(place).remove()
    new.replace(place)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """List the paths of the complete checkpoints directly in a folder, in the order of their names."""
    inside = folder_at(folder)
    names = set(inside.names())
    # Between the two renames of `publish` the old checkpoint has no name of its own.
    hidden = (_HIDDEN.fullmatch(name) for name in names)
    names |= {match["name"] for match in hidden if match is not None and match["kind"] == _REPLACED}
    paths = (f"{inside.name.rstrip('/')}/{name}" for name in sorted(names) if not _HIDDEN.fullmatch(name))
    return [path for path in paths if is_sharded_checkpoint(path)]


def clean_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove what interrupted saves and removals left in a folder, and nothing else.

    A checkpoint that was being replaced when its process died gets its name back. What cannot be removed is warned of.
    Must not be called while a save is under way in the folder.
    """
    if is_url(folder):
        inside = folder_at(folder)
        for name in inside.names():
            _clean_remote(inside.child(name))
        return
    for name in LocalFolder(Path(folder)).names():
        match, path = _HIDDEN.fullmatch(name), Path(folder) / name
        if match is None or not (path.is_dir() or match["kind"] == _REPLACED):
            continue
        if match["kind"] == _REPLACED and not os.path.lexists(Path(folder) / match["name"]):
            path.rename(Path(folder) / match["name"])
            continue
        if _remove_leftover(path):
            logger.info("removed %s, which an interrupted save left", path)


def unfinished_path(path: Path) -> Path:
    """Return the sibling directory that a checkpoint is written to before it gets its name."""
    return _hidden(path, _UNFINISHED)


def _readable(path: str | os.PathLike[str]) -> Folder:
    if is_url(path):
        return folder_at(path)
    local, replaced = Path(path), _hidden(Path(path), _REPLACED)
    return LocalFolder(local if local.exists() or not replaced.exists() else replaced)


def _remove_leftover(path: Path) -> bool:
    """Remove what no longer is a checkpoint; if that fails, leave it to the next save and return False."""
    try:
        remove_path(path)
    except OSError as error:
        logger.warning("%s could not be removed, the next save tries again: %s", path, error)
        return False
    return True


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _clean_remote(root: Folder) -> None:
    """Remove the folders of saves that the header does not name."""
    found = [name for name in root.names() if _REMOTE.fullmatch(name)]
    try:
        kept = Header.read(root).folder if found and root.exists(HEADER) else None
    except (CorruptDataError, UnsupportedError):
        return  # it may name any of them
    for name in found:
        if name != kept:
            root.remove(name)
            logger.info("removed %s/%s, which an interrupted save left", root.name, name)
