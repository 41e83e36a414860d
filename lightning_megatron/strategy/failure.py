"""End the whole job soon after one rank fails, with that rank's traceback first."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_megatron.groups.notices import Notices
from lightning_megatron.strategy.positions import Position, birth_of
from lightning_megatron.strategy.private import SIGTERMException, TunerExitException

#: Set for the processes that our launcher starts: the process whose end must end them.
LAUNCHER_PID = "LIGHTNING_MEGATRON_LAUNCHER_PID"

#: Ways to leave a run that are no failure of this rank.
_ORDERLY = (KeyboardInterrupt, SystemExit, SIGTERMException, TunerExitException)

_POLL_SECONDS = 0.25
#: How often one rank of each machine asks whether a rank of another machine has failed (seconds).
_POLL_NOTICES_SECONDS = 2.0
_FAILED = "failed"
#: How long a rank may go on after another one failed: enough to raise the same error, or to finish a log file
#: (seconds).
_GRACE_SECONDS = 4.0
#: How long callbacks and clean-up of a failed rank may take while other ranks have not failed (seconds).
_CLEANUP_SECONDS = 10.0

#: The folder of a job that has failed is removed by a later one after this time; ranks write to theirs all the time
#: (seconds).
_OLD_SECONDS = 7 * 24 * 3600.0


class FailureWatch:
    """Watch over the ranks of one job.

    The first rank that raises writes its traceback to stderr and to a file that the other ranks of its node look for.
    Their own errors, mostly connections that the first rank has closed, are reported in one line; a rank that is still
    waiting in a collective after a grace period is ended. If all ranks raise within that period, all exceptions reach
    the user's code as usual. A rank whose launcher has died ends, too. Ranks of other machines learn of the failure
    through the job's store.

    Args:
        rank: Global rank of this process.
        num_local: Ranks on this node (ranks).
    """

    def __init__(self, rank: int, num_local: int = 1) -> None:
        self.rank, self._num_local = rank, num_local
        self._folder: Path | None = None
        self._notices: Notices | None = None
        self._failed: BaseException | None = None
        self._stop = threading.Event()
        self._stop.set()
        self._cleanup_timer: threading.Timer | None = None

    @property
    def has_failed(self) -> bool:
        """Tell whether this rank has raised in the last run."""
        return self._failed is not None

    def join_job(self, job: str, notices: Notices | None = None) -> Path | None:
        """Begin to look for failures of the ranks that share ``job``, a name of no other job; only while guarded.

        Args:
            job: The name.
            notices: What the ranks of all machines can read, if there are several.

        Returns:
            A folder that the ranks of this machine share; None if nothing is guarded.
        """
        if self._stop.is_set():
            return None
        prefix = f"lightning_megatron_{os.getuid()}_"
        folder = Path(tempfile.gettempdir()) / f"{prefix}{job}"
        _remove_old(folder.parent, prefix)
        folder.mkdir(exist_ok=True)
        self._notices, self._folder = notices, folder
        return folder

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Watch while the block runs, and report an exception that leaves it before anything else sees it."""
        self._failed, self._folder, self._notices, self._stop = None, None, None, threading.Event()
        threading.Thread(target=self._look, args=(self._stop,), daemon=True, name="failure-watch").start()
        try:
            yield
        except _ORDERLY:
            raise
        except BaseException as error:
            self.report(error)
            raise
        finally:
            self._stop.set()
            if self._failed is None and self._folder is not None and not self._first_report():
                shutil.rmtree(self._folder, ignore_errors=True)

    def cleanup_done(self) -> None:
        """Note that callbacks and clean-up of this rank have come to their end."""
        if self._cleanup_timer is not None:
            self._cleanup_timer.cancel()

    def report(self, error: BaseException) -> None:
        """Say that this rank failed: the first rank with its traceback, the others in one line."""
        self._failed = error
        if self._claim():
            text = "".join(traceback.format_exception(error))
            self._say(f"failed; the other ranks will be stopped.\n{text}")
            if self._folder is not None:
                (self._folder / "told").touch()
        elif self._first_name() != f"rank {self.rank}":
            self._wait_for_first()
            summary = str(error).strip().partition("\n")[0][:200]
            self._say(
                f"stops after {self._first_name()} failed, whose report is above: {type(error).__name__}: {summary}"
            )
        self._replace_excepthook()
        self._cleanup_timer = _daemon_timer(_CLEANUP_SECONDS, self._end_if_alone)

    def report_hang(self, text: str, silent: Sequence[Position]) -> None:
        """Say that this rank waits in vain, and end the job.

        Args:
            text: Which ranks it waits for.
            silent: Ranks that give no sign of life; those of this machine are killed.
        """
        if not self._claim():
            return
        self._say(text)
        if self._folder is not None:
            (self._folder / "told").touch()
        for position in silent:
            _kill(position)

    def _claim(self) -> bool:
        """Become the first failed rank, or find that there is one; True without other ranks."""
        if self._folder is None:
            return True
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"failed_{self.rank}").touch()
        if not self._write_first(f"rank {self.rank}"):
            return False
        if self._notices is not None:
            elsewhere = self._notices.read([_FAILED])
            if elsewhere:
                (self._folder / "first").write_text(elsewhere[_FAILED], encoding="utf-8")
                (self._folder / "told").touch()
                return False
            self._notices.post(_FAILED, f"rank {self.rank}")
        return True

    def _write_first(self, name: str) -> bool:
        """Name the rank that failed first for the ranks of this machine, unless that has been done."""
        assert self._folder is not None, "the job has been joined"
        try:
            with (self._folder / "first").open("x", encoding="utf-8") as file:
                file.write(name)
        except FileExistsError:
            return False
        return True

    def _wait_for_first(self) -> None:
        """Let the first rank finish writing its traceback."""
        deadline = time.monotonic() + _GRACE_SECONDS / 2
        while self._folder is not None and not (self._folder / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _first_report(self) -> Path | None:
        path = None if self._folder is None else self._folder / "first"
        return path if path is not None and path.exists() else None

    def _first_name(self) -> str:
        path = self._first_report()
        return (path.read_text(encoding="utf-8") if path is not None else "") or "another rank"

    def _replace_excepthook(self) -> None:
        """Do not print the same exception again when it ends the process."""
        before, failed = sys.excepthook, self._failed

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if error is not failed:
                before(kind, error, trace)
            # Clean-up at exit may wait for ranks that are gone.
            _daemon_timer(_GRACE_SECONDS, lambda: os._exit(1))

        sys.excepthook = hook

    def _end_if_alone(self) -> None:
        """End this process if it waits in its clean-up for ranks that have not failed and will not come."""
        if self._folder is not None and len(list(self._folder.glob("failed_*"))) < self._num_local:
            os._exit(1)

    def _look(self, stop: threading.Event) -> None:
        launcher = os.environ.get(LAUNCHER_PID)
        launched = launcher is not None and launcher == str(os.getppid())
        asked = time.monotonic()
        while not stop.wait(_POLL_SECONDS):
            if launched and str(os.getppid()) != launcher and not stop.wait(_CLEANUP_SECONDS):
                self._say("stops because the process that launched it has ended.")
                os._exit(1)
            if self._first_report() is not None and not stop.wait(_GRACE_SECONDS):
                if self._first_name() != f"rank {self.rank}":
                    self._say(f"waits for other ranks and is stopped, because {self._first_name()} failed.")
                os._exit(1)
            if time.monotonic() - asked >= _POLL_NOTICES_SECONDS:
                asked = time.monotonic()
                self._look_elsewhere()

    def _look_elsewhere(self) -> None:
        """Tell the ranks of this machine if one of another machine has failed."""
        # One rank of each machine asks, so that the store of a large job is not asked all the time.
        if self._notices is None or self.rank % self._num_local or self._first_report() is not None:
            return
        elsewhere = self._notices.read([_FAILED])
        if elsewhere and self._write_first(elsewhere[_FAILED]) and self._folder is not None:
            (self._folder / "told").touch()

    def _say(self, text: str) -> None:
        # One write, so that the ranks' lines do not mix. If nobody reads them any more, this rank must still end.
        with suppress(OSError):
            sys.stderr.write(f"[rank {self.rank}] {text}\n")
            sys.stderr.flush()


def _daemon_timer(seconds: float, function: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


def _remove_old(parent: Path, prefix: str) -> None:
    """Remove what failed jobs have left: their last ranks could not know that nobody looks there any more."""
    with suppress(OSError):
        for folder in parent.glob(f"{prefix}*"):
            if time.time() - folder.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _kill(position: Position) -> None:
    """Kill a stopped process of this machine, which can neither end itself nor follow its launcher."""
    if position.host == socket.gethostname() and position.birth and birth_of(position.pid) == position.birth:
        with suppress(OSError):
            os.kill(position.pid, signal.SIGKILL)
