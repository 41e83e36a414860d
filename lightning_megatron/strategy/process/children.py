"""Supervision between a launcher and its processes: failures of processes end the launcher, and a
rank exits if its launcher has died.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from lightning_megatron.strategy.process.rank_status import start_time_of
from lightning_megatron.strategy.process.signals import EXIT_CODE

_POLL_SECONDS = 0.25
#: Time that this process may continue after another one failed, long enough to raise the same error
#: (seconds).
_GRACE_SECONDS = 5.0
#: Time that other processes may run after this process has finished, before they are killed
#: (seconds).
_EXIT_TIMEOUT_SECONDS = 300.0
#: Environment variable with PID and start time of this package's launcher, set for its processes.
LAUNCHER = "LIGHTNING_MEGATRON_LAUNCHER"
#: Environment variable that torchrun sets for its workers.
_TORCHRUN = "TORCHELASTIC_RUN_ID"


class ChildProcesses:
    """Launched processes: the launcher waits for them and exits if one of them fails.

    Without this supervision a script would report success if another rank fails late, such as in
    the ``teardown`` hook.

    Args:
        first_rank: Global rank of the first launched process.
        end: Function that exits this process with an exit code.
        note_exit: Function of the rank and the exit code of a process, which reports ranks that
            ended by themselves.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen],
        first_rank: int,
        end: Callable[[int], None],
        note_exit: Callable[[int, int], None],
    ) -> None:
        self._processes = dict(enumerate(processes, first_rank))
        self._first_rank = first_rank
        self._end = end
        self._note_exit = note_exit
        self._is_over = threading.Event()
        self._reported: set[int] = set()

    def watch(self) -> None:
        """Start watching, until this process exits."""
        threading.Thread(target=self._check_processes, daemon=True, name="children-watch").start()
        # Exit handlers run in reverse order of registration: this one runs after the script, and
        # before the handlers of modules that were imported earlier.
        atexit.register(self._wait)

    def forget(self) -> None:
        """Stop treating exits as failures, because this process is about to kill its children."""
        self._is_over.set()

    def wait_for_end(self) -> None:
        """Wait for the killed processes to exit."""
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)

    def failed(self) -> int | None:
        """Return the shell exit code of the first process that failed; None if none did."""
        codes = [process.poll() for process in self._processes.values()]
        return next((code if code > 0 else 128 - code for code in codes if code), None)

    def _check_processes(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self._report_ends()
            code = self.failed()
            if code is not None:
                if not self._is_over.wait(_grace(code)):
                    self._finish(code)
            elif all(process.poll() == 0 for process in self._processes.values()):
                return

    def _wait(self) -> None:
        """Wait for the processes when this one exits, and adopt the exit code of a failed one.

        Processes may wait for a script that has ended with an exception. They get little time.
        """
        if self._is_over.is_set():
            return
        self._is_over.set()
        timeout = _GRACE_SECONDS if _has_raised() else _EXIT_TIMEOUT_SECONDS
        deadline = time.monotonic() + timeout
        while self._running():
            code = self.failed()
            if code is not None:
                deadline = min(deadline, time.monotonic() + _grace(code))
            if time.monotonic() > deadline:
                if code is None:
                    self._report_stopped(timeout)
                self._finish(code or 1)
            time.sleep(0.02)
        code = self.failed()
        if code is not None:
            self._finish(code)

    def _running(self) -> dict[int, subprocess.Popen]:
        """Return the processes that have not ended, by rank."""
        return {rank: part for rank, part in self._processes.items() if part.poll() is None}

    def _report_stopped(self, timeout: float) -> None:
        running = ", ".join(f"rank {rank}" for rank in self._running())
        sys.stderr.write(
            f"{running} did not end within {timeout:g} s after the script of rank "
            f"{self._first_rank - 1} and will be stopped.\n"
        )

    def _report_ends(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and rank not in self._reported:
                self._reported.add(rank)
                self._note_exit(rank, code)

    def _finish(self, code: int) -> None:
        """Kill the running processes and exit."""
        self._report_ends()
        for process in self._running().values():
            process.send_signal(signal.SIGKILL)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        logging.shutdown()
        self._end(code)


def _has_raised() -> bool:
    """Return whether an exception has ended the script of this process."""
    return getattr(sys, "last_value", None) is not None


def _grace(code: int) -> float:
    # Ranks that save and exit after a signal have not failed, and exit at different times.
    return _EXIT_TIMEOUT_SECONDS if code == EXIT_CODE else _GRACE_SECONDS


def launcher_mark() -> str:
    """Return a mark that identifies this process as a launcher."""
    return f"{os.getpid()} {start_time_of(os.getpid())}"


def launcher_is_gone(environment: Mapping[str, str]) -> Callable[[], bool] | None:
    """Return a check of whether this process's launcher has ended; None without a launcher.

    A launcher is the one of this package, torchrun's agent or a parent of ``multiprocessing``.
    """
    parent = os.getppid()
    spawner = multiprocessing.parent_process()
    if spawner is not None:
        return lambda: not spawner.is_alive()
    pid, _, start_time = environment.get(LAUNCHER, "").partition(" ")
    if pid and pid != str(parent):
        # The launcher has already ended, or it is an indirect parent of this process.
        return lambda: bool(start_time) and start_time_of(int(pid)) != start_time
    if pid or (environment.get(_TORCHRUN) and parent != 1):
        return lambda: os.getppid() != parent
    return None
