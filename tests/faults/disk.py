"""A small disk that only the processes of a test see in the place of a folder."""

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
    """A file system in memory that one process and its relatives see.

    Args:
        folder: Place of the mount for these processes.
        pid: Process that keeps the mount, which ends with the last process that sees it.
    """

    folder: Path
    pid: int

    @property
    def command(self) -> tuple[str, ...]:
        """Return the words before a command that let it see the disk."""
        return "nsenter", f"--target={self.pid}", "--mount", f"--wdns={ROOT}", "--"

    def view(self, job: Job) -> Job:
        """Return a job with the path under which this process sees its folder."""
        return replace(job, folder=f"/proc/{self.pid}/root{job.root.resolve()}")

    def remount(self, options: str) -> None:
        """Change size or mode. A disk becomes read-only only after current writes have ended."""

        def is_remounted() -> bool:
            command = [*self.command, "mount", "-o", f"remount,{options}", os.fspath(self.folder)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0 or "busy" in result.stderr, result.stderr
            return result.returncode == 0

        wait_until(is_remounted, f"remount {options}")


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """Mount a disk for the duration of the block. Skip the test if that is impossible.

    Args:
        folder: Place of the mount.
        size: Size of the disk (bytes).
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
