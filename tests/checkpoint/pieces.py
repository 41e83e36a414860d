"""Small entries and failing disks for tests of saving."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.checkpoint import Entry, read_full
from lightning_megatron.checkpoint.storage import LocalFolder
from lightning_megatron.groups.shard_spec import replicated_spec

WEIGHT = "state_dict.weight"


def entry_of(tensor: Tensor) -> Entry:
    """Return the entry of a tensor that every rank holds in full."""
    return Entry(tensor, replicated_spec(tensor))


def entries(value: float = 1.0, size: int = 3) -> dict[str, Entry]:
    """Return the entry of one tensor that is filled with a value."""
    return {WEIGHT: entry_of(torch.full((size,), value))}


def value_in(path: object) -> float:
    """Return the value that fills the tensor of a checkpoint."""
    values = set(read_full(str(path))[WEIGHT].tolist())
    assert len(values) == 1, f"{path} holds {values}"
    return values.pop()


def names_in(folder: Path) -> list[str]:
    """List the names in a directory, hidden names included."""
    return sorted(path.name for path in folder.iterdir())


class FullDisk:
    """A file on a disk that has room for a given number of bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        """Write while there is room."""
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str, room: int) -> None:
    """Make writes fail after ``room`` bytes in files whose name contains ``name``."""
    create = LocalFolder.create

    @contextmanager
    def limited(self: LocalFolder, file_name: str) -> Iterator[IO[bytes]]:
        with create(self, file_name) as file:
            yield FullDisk(file, room) if name in file_name else file  # type: ignore[misc]

    monkeypatch.setattr(LocalFolder, "create", limited)
