"""File lock that lets one process write files while other processes wait for the result."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Lock the file ``path`` during the context.

    Other processes block until the context ends. The kernel releases the lock of a process that
    dies.

    Args:
        path: Lock file; it is created, and stays after the context.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Do not remove the file: a third process could then create and lock another file of the
        # same name while the second still waits for this one.
        os.close(descriptor)
