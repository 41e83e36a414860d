"""A small disk that the processes of a test see in the place of a folder, and nobody else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.faults.agent import ROOT, wait_until
from tests.faults.holder import namespace
from tests.faults.train import Job

TOOLS = ("mount", "unshare", "nsenter")


@dataclass(frozen=True)
class Disk:
    """Name a file system in memory that is mounted where one process and its kind see it.

    Args:
        folder: Where it is mounted for them.
        pid: The process that keeps the mount; it is gone with the last process that sees it.
    """

    folder: Path
    pid: int

    @property
    def command(self) -> tuple[str, ...]:
        """Return what to put before a command that shall see the disk."""
        return "nsenter", f"--target={self.pid}", "--mount", f"--wdns={ROOT}", "--"

    def view(self, job: Job) -> Job:
        """Return a job as this process can look at it."""
        return replace(job, folder=f"/proc/{self.pid}/root{job.root.resolve()}")

    def remount(self, options: str) -> None:
        """Change size or mode; a disk that is being written to is read-only only afterwards."""

        def done() -> bool:
            command = [*self.command, "mount", "-o", f"remount,{options}", os.fspath(self.folder)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0 or "busy" in result.stderr, result.stderr
            return result.returncode == 0

        wait_until(done, f"remount {options}")


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """Mount a disk for the length of the block; skip the test where that cannot be.

    Args:
        folder: Where.
        size: Its room (bytes).
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() or missing:
        pytest.skip(
            f"a disk of one's own needs root and {', '.join(TOOLS)}: user {os.geteuid()}, missing "
            f"{missing}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    script = 'mount -t tmpfs -o "size=$1" tmpfs "$0"'
    with ExitStack() as stack:
        try:
            opened = namespace(
                "--mount",
                "--propagation=private",
                script=script,
                arguments=(os.fspath(folder), str(size)),
            )
            process = stack.enter_context(opened)
        except RuntimeError as error:
            pytest.skip(f"a small disk cannot be mounted here: {error}")
        yield Disk(folder.resolve(), process.pid)
