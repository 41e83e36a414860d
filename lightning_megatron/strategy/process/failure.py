"""Failure detection: one failed rank ends the whole job, with its traceback printed first."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lightning_megatron.errors import REFUSALS, TRACEBACK
from lightning_megatron.groups.agent_store import first_claim
from lightning_megatron.groups.notices import Notices
from lightning_megatron.once import say_once, started_rank
from lightning_megatron.strategy.private.processes import SIGTERMException, TunerExitException
from lightning_megatron.strategy.process.children import launcher_is_gone
from lightning_megatron.strategy.process.job_folder import JobFolder, remove_sockets
from lightning_megatron.strategy.process.rank_status import RankStatus, start_time_of

#: Exceptions that end a run without a failure of this rank.
_NORMAL_EXITS = (KeyboardInterrupt, SystemExit, SIGTERMException, TunerExitException)

_POLL_SECONDS = 0.25
#: Shortest interval at which one rank of each machine checks the job's store for failures of other
#: machines (seconds), and checks of all machines together (1 / seconds).
_POLL_NOTICES_SECONDS = 2.0
_POLLS_PER_SECOND = 500
_FAILED = "failed"
#: Time that a rank may continue after another rank failed. It is long enough to raise the same
#: error or to finish a log file (seconds).
_GRACE_SECONDS = 4.0
#: Time for the callbacks and clean-up of a failed rank while other ranks have not failed (seconds).
_CLEANUP_SECONDS = 10.0


class FailureWatch:
    """Failure detection over the ranks of one job.

    The first rank that raises prints its traceback, a refusal its message before it, and writes its
    name to a file that the other ranks of its machine poll. Ranks of other machines are notified
    through the job's store. A rank that fails later reports its error in one line, because most of
    these errors are connections that the first rank closed. The same refusal is not printed again.

    A rank that still waits in a collective after a grace period exits. If all ranks raise within
    that period, their exceptions reach the user's code as usual. A rank also exits when the process
    that launched it ends during a run.

    Args:
        num_local: Number of ranks on this machine (ranks).
    """

    def __init__(self, rank: int, num_local: int = 1) -> None:
        self.rank = rank
        self._num_local = num_local
        self._joined: JobFolder | None = None
        self._notices: Notices | None = None
        self._notices_pause = _POLL_NOTICES_SECONDS
        self._failed: BaseException | None = None
        self._stop = threading.Event()
        self._stop.set()
        self._cleanup_timer: threading.Timer | None = None
        self._left_folder: JobFolder | None = None

    @property
    def _folder(self) -> Path | None:
        return None if self._joined is None else self._joined.path

    @property
    def has_failed(self) -> bool:
        """Return whether this rank has raised in the last run."""
        return self._failed is not None

    def join_job(
        self, job: str, notices: Notices | None = None, num_machines: int = 1
    ) -> Path | None:
        """Start watching the ranks that share ``job``, a unique job name; only inside ``guard``.

        Args:
            notices: Messages in the job's store, for jobs on several machines; None on one machine.

        Returns:
            The folder that the ranks of this machine share; None outside of ``guard``.
        """
        if self._stop.is_set():
            return None
        self._notices = notices
        self._notices_pause = max(_POLL_NOTICES_SECONDS, num_machines / _POLLS_PER_SECOND)
        self._joined = JobFolder(job, self.rank)
        return self._folder

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Watch while the block runs, and report an exception before it propagates."""
        self.leave()
        self._failed = None
        self._notices = None
        self._stop = threading.Event()
        threading.Thread(
            target=self._watch_failures, args=(self._stop,), daemon=True, name="failure-watch"
        ).start()
        try:
            yield
        except _NORMAL_EXITS as error:
            self.leave(_early_end(error))
            raise
        except BaseException as error:
            self.report(error)
            raise
        finally:
            self._stop.set()
            if self._failed is None:
                self.leave()

    def leave(self, early: str = "") -> None:
        """Remove the files of this rank.

        Args:
            early: How this rank leaves a run that other ranks may continue; empty at its end.
        """
        joined = self._joined
        self._joined = None
        if joined is not None:
            self._left_folder = joined
            joined.leave(early)

    def remove_all_files(self) -> None:
        """Remove the files of all ranks of this machine after they have been killed."""
        if self._left_folder is not None:
            self._left_folder.leave()

    def end(self, code: int) -> None:
        """Exit this process immediately."""
        self.leave()
        remove_sockets()
        os._exit(code)

    def cleanup_done(self) -> None:
        """Record that the callbacks and clean-up of this rank have finished."""
        if self._cleanup_timer is not None:
            self._cleanup_timer.cancel()

    def report(self, error: BaseException) -> None:
        """Report a failure of this rank: a traceback from the first failed rank, else one line."""
        self._failed = error
        # Other ranks read the name of the failed rank from these files until this process exits.
        atexit.register(self.leave)
        if isinstance(error, RuntimeError):
            self._report_first_leaver()
        if self._claim():
            if self._folder is None and isinstance(error, REFUSALS):
                say_once(str(error), lambda: self._print_line(_text_of(error)), first_claim)
            else:
                self._print_line(_text_of(error))
            self._report_is_printed(f"rank {self.rank}", str(error))
        else:
            name, message = self._wait_for_first()
            is_known = isinstance(error, REFUSALS) and message == str(error)
            if name != f"rank {self.rank}" and not is_known:
                summary = str(error).strip().partition("\n")[0][:200]
                self._print_line(
                    f"stops after {name or 'another rank'} failed, whose report is above: "
                    f"{type(error).__name__}: {summary}"
                )
        error.is_reported = True  # type: ignore[attr-defined]
        self._replace_excepthook()
        self._cleanup_timer = _daemon_timer(_CLEANUP_SECONDS, self._end_if_alone)

    def note_exit(self, rank: int, code: int) -> None:
        """Report a process that this one has launched, if it ended during the run by itself.

        Args:
            rank: Global rank of the process.
            code: Its exit code; the negative number of the signal that ended it.
        """
        joined = self._joined
        how = "" if joined is None else joined.early_leavers().get(rank, "")
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        elif joined is not None and joined.has(rank):
            how = f"ended with exit code {code} and without an error message"
        if how:
            self._report_end(rank, how)

    def report_hang(self, text: str, silent: Sequence[RankStatus]) -> None:
        """Report that this rank hangs, and end the job.

        Args:
            silent: Last statuses of ranks that do not respond; those of this machine are killed.
        """
        if not self._claim():
            return
        self._print_line(text)
        self._report_is_printed(f"rank {self.rank}")
        for status in silent:
            _kill(status)

    def _report_first_leaver(self) -> None:
        """Report a rank that left by itself, because the others fail only by its absence."""
        begun = time.monotonic()
        joined = self._joined
        while joined is not None and not self._first()[0]:
            left = joined.early_leavers()
            waited = time.monotonic() - begun
            is_known = any(left.values())
            # The launcher of an ended process reads its exit code soon, and connections are closed
            # just before a process ends.
            if is_known or waited > (_GRACE_SECONDS / 2 if left else _POLL_SECONDS):
                self._report_leaver(left)
                return
            time.sleep(0.02)

    def _report_leaver(self, left: Mapping[int, str]) -> None:
        for rank, how in sorted(left.items(), key=lambda leaver: (not leaver[1], leaver[0]))[:1]:
            self._report_end(rank, how or "ended without an error message")

    def _report_end(self, rank: int, how: str) -> None:
        """Report how another rank has ended, unless a rank has failed before."""
        if self._folder is not None:
            if not self._claim_first(f"rank {rank}"):
                return
            if self._notices is not None:
                self._notices.post(_FAILED, f"rank {rank}")
        self._print_line(f"{how}; the other ranks will be stopped.", rank)
        self._report_is_printed(f"rank {rank}")

    def _claim(self) -> bool:
        """Return whether this rank is the first to fail; True without other ranks.

        The job folder has two kinds of marker files: ``failed_<rank>`` for each failed rank, and
        ``first`` with the name of the first one, behind which a newline and its message stand
        once its report is printed.
        """
        folder = self._folder
        if folder is None:
            return True
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"failed_{self.rank}").touch()
        if not self._claim_first(f"rank {self.rank}"):
            return False
        if self._notices is not None:
            # A rank of another machine may have failed before, which this machine has not yet read.
            other_failures = self._notices.read([_FAILED])
            if other_failures:
                self._report_is_printed(other_failures[_FAILED])
                return False
            self._notices.post(_FAILED, f"rank {self.rank}")
        return True

    def _claim_first(self, name: str) -> bool:
        """Write the name of the first failed rank for this machine's ranks, if none is written."""
        # Another thread may leave the folder in between.
        folder = self._folder
        try:
            if folder is not None:
                with (folder / "first").open("x", encoding="utf-8") as file:
                    file.write(name)
        except (FileExistsError, FileNotFoundError):
            return False
        return folder is not None

    def _report_is_printed(self, name: str, message: str = "") -> None:
        """Tell the ranks of this machine that the report of the first failed rank is printed."""
        if (folder := self._folder) is not None:
            (folder / "first").write_text(f"{name}\n{message}", encoding="utf-8")

    def _wait_for_first(self) -> tuple[str, str | None]:
        """Return name and message of the first failed rank, which prints its traceback before."""
        deadline = time.monotonic() + _GRACE_SECONDS / 2
        while (first := self._first())[1] is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return first

    def _first(self) -> tuple[str, str | None]:
        """Return name and message of the first failed rank.

        Without any the name is empty, and before its report the message is None.
        """
        text = ""
        with suppress(FileNotFoundError):
            if (folder := self._folder) is not None:
                text = (folder / "first").read_text(encoding="utf-8")
        name, is_printed, message = text.partition("\n")
        return name, message if is_printed else None

    def _replace_excepthook(self) -> None:
        """Install an excepthook that does not print a reported exception again."""
        before = sys.excepthook
        failed = self._failed

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if error is not failed:
                before(kind, error, trace)
            # Clean-up at exit may wait for ranks that no longer exist.
            _daemon_timer(_GRACE_SECONDS, lambda: self.end(1))

        sys.excepthook = hook

    def _end_if_alone(self) -> None:
        """Exit this process if its clean-up waits for ranks that will never arrive."""
        if self._folder is not None and len(list(self._folder.glob("failed_*"))) < self._num_local:
            self.end(1)

    def _watch_failures(self, stop: threading.Event) -> None:
        launcher_gone = launcher_is_gone(os.environ)
        last_read = time.monotonic()
        complete = time.monotonic()
        while not stop.wait(_POLL_SECONDS):
            # A kill signal from the operating system at the death of the launcher would be faster,
            # but would leave temporary files behind.
            if launcher_gone is not None and launcher_gone():
                self._print_line("stops because the process that launched it has ended.")
                self.end(1)
            left = self._joined.early_leavers() if self._joined is not None else {}
            if not left:
                complete = time.monotonic()
            elif time.monotonic() - complete > _GRACE_SECONDS:
                # Otherwise all ranks may be about to leave in the same way.
                self._report_leaver(left)
            name, _ = self._first()
            if name and not stop.wait(_GRACE_SECONDS):
                if name != f"rank {self.rank}":
                    self._print_line(
                        f"waits for other ranks and is stopped, because {name} failed."
                    )
                self.end(1)
            if time.monotonic() - last_read >= self._notices_pause:
                last_read = time.monotonic()
                self._read_other_machines()

    def _read_other_machines(self) -> None:
        """Notify the ranks of this machine of a failure on another machine."""
        # Only one rank of each machine reads the store, which limits its load in a large job.
        if self._notices is None or self.rank % self._num_local or self._first()[0]:
            return
        other_failures = self._notices.read([_FAILED])
        if other_failures and self._claim_first(other_failures[_FAILED]):
            self._report_is_printed(other_failures[_FAILED])

    def _print_line(self, text: str, rank: int | None = None) -> None:
        # A single write keeps the lines of different ranks apart. A closed stderr must not keep
        # this rank from exiting.
        with suppress(OSError):
            sys.stderr.write(f"[rank {self.rank if rank is None else rank}] {text}\n")
            sys.stderr.flush()


def say_refusals_once() -> None:
    """Let a refusal that ends a rank of torchrun, SLURM or MPI be printed by one of these ranks."""
    before = sys.excepthook
    if started_rank() is None or getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, REFUSALS):
            say_once(str(error), lambda: before(kind, error, trace), first_claim)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _early_end(error: BaseException) -> str:
    """Describe how an exception ends a run on this rank; empty if all ranks have agreed on it."""
    if isinstance(error, (SIGTERMException, TunerExitException)):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"left the run by {error!r}{place}"


def _text_of(error: BaseException) -> str:
    """Return the report of a failed rank.

    The message of a refusal, and of a device whose memory is full, stands before the traceback; in
    a command a refusal is its message alone.
    """
    failed = "failed; the other ranks will be stopped.\n"
    if not isinstance(error, (*REFUSALS, torch.OutOfMemoryError)):
        return failed + "".join(traceback.format_exception(error))
    if os.environ.get(TRACEBACK) == "0" and isinstance(error, REFUSALS):
        return str(error)
    trace = "".join(traceback.format_tb(error.__traceback__))
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return (
        f"{failed}{type(error).__name__}: {message}\n\nTraceback (most recent call last):\n{trace}"
    )


def _daemon_timer(seconds: float, function: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


def _kill(status: RankStatus) -> None:
    """Kill a stopped process of this machine, which cannot exit by itself."""
    if (
        status.host == socket.gethostname()
        and status.start_time
        and start_time_of(status.pid) == status.start_time
    ):
        with suppress(OSError):
            os.kill(status.pid, signal.SIGKILL)
