"""Temporary folder shared by the ranks of a job on one machine."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path

from lightning_megatron.strategy.process.rank_status import start_time_of

#: Age after its last change at which any job folder is removed, even if its processes are not
#: visible from this machine. Running ranks write to their folder all the time (seconds).
_REMOVE_AFTER_SECONDS = 7 * 24 * 3600.0
#: Age after its last change up to which a folder is kept, because its ranks may still be joining
#: (seconds).
_KEEP_SECONDS = 60.0


class JobFolder:
    """Folder of a job in the system's temporary directory, removed by the last rank that leaves.

    Every rank writes a file that identifies its process. A rank that leaves removes this file, and
    the folder if the processes of all other ranks have ended. If all ranks were killed, the next
    job on this machine removes the folder.
    """

    def __init__(self, job: str, rank: int) -> None:
        prefix = f"lightning_megatron_{os.getuid()}_"
        self.path = Path(tempfile.gettempdir()) / f"{prefix}{job}"
        _remove_forgotten(self.path.parent, prefix)
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


def _remove_forgotten(parent: Path, prefix: str) -> None:
    """Remove the folders of jobs whose ranks were all killed."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = folder.lstat()
            # Any user may create an entry of this name, whose files could be links or pipes.
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            age = time.time() - status.st_mtime
            files = list(folder.glob("process_*"))
            is_dead = age > _KEEP_SECONDS and files and not any(map(_may_be_alive, files))
            if is_dead or age > _REMOVE_AFTER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
