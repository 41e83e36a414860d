"""Temporary folder shared by the ranks of a job on one machine."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path

from lightning_megatron.strategy.process.rank_status import start_time_of


class JobFolder:
    """Folder of a job in the system's temporary directory, removed by the last rank that leaves.

    Every rank writes a file that identifies its process. A rank that leaves removes this file, and
    the folder if the processes of all other ranks have ended.
    """

    def __init__(self, job: str, rank: int) -> None:
        self.path = Path(tempfile.gettempdir()) / f"lightning_megatron_{os.getuid()}_{job}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._rank = rank
        self._own_file = self.path / f"process_{rank}"
        self._own_file.write_text(
            f"{os.getpid()} {start_time_of(os.getpid())} {socket.gethostname()}", encoding="utf-8"
        )

    def has(self, rank: int) -> bool:
        """Return whether a rank has joined and not left, alive or not."""
        return (self.path / f"process_{rank}").exists()

    def early_leavers(self) -> dict[int, str]:
        """Return how ranks have left a run that others continue; empty text if that is unknown."""
        left: dict[int, str] = {}
        with suppress(OSError):
            ended = [file for file in self.path.glob("process_*") if not _may_be_alive(file)]
            # A rank that leaves at the end of a run removes its file.
            left = {_rank_of(file): "" for file in ended if file.exists()}
            for file in self.path.glob("left_*"):
                left[_rank_of(file)] = file.read_text(encoding="utf-8")
        return left

    def leave(self, early: str = "") -> None:
        """Remove this rank's file, and the folder if no other rank is left.

        Args:
            early: How this rank leaves a run that other ranks may continue; empty at its end.
        """
        with suppress(OSError):
            if early:
                (self.path / f"left_{self._rank}").write_text(early, encoding="utf-8")
            self._own_file.unlink(missing_ok=True)
            if not any(_may_be_alive(file) for file in self.path.glob("process_*")):
                shutil.rmtree(self.path, ignore_errors=True)


def remove_sockets() -> None:
    """Remove the folder of sockets that ``multiprocessing`` keeps for this process.

    A process that ends by ``os._exit`` would leave it behind.
    """
    with suppress(OSError):
        # The folder is created if it does not exist.
        shutil.rmtree(get_temp_dir())


def _rank_of(file: Path) -> int:
    return int(file.name.rpartition("_")[2])


def _may_be_alive(file: Path) -> bool:
    """Return whether a file's process may be alive; True for processes of other machines."""
    try:
        pid, start_time, host = file.read_text(encoding="utf-8").split(" ", 2)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        # The file is incomplete: another rank is still writing it.
        return True
    return host != socket.gethostname() or not start_time or start_time_of(int(pid)) == start_time
