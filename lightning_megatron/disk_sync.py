"""Waits until written files and renames are on the disk, so that they survive a crash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def sync_file(file: IO[bytes]) -> None:
    """Wait until what an open file was given is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
