"""Exit of a rank whose launcher has died."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Mapping

from lightning_megatron.strategy.process.rank_status import start_time_of

#: Environment variable with PID and start time of this package's launcher, set for its processes.
LAUNCHER = "LIGHTNING_MEGATRON_LAUNCHER"
#: Environment variable that torchrun sets for its workers.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_POLL_SECONDS = 0.25


def launcher_mark() -> str:
    """Return a mark that identifies this process as a launcher."""
    return f"{os.getpid()} {start_time_of(os.getpid())}"


def launcher_is_gone(environment: Mapping[str, str]) -> Callable[[], bool] | None:
    """Return a check of whether this process's launcher has ended; None without a launcher.

    A launcher is the one of this package, torchrun's agent or a parent of ``multiprocessing``.

    Args:
        environment: Environment variables of this process.
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


def watch_launcher(end: Callable[[], None]) -> None:
    """Call a method soon after the launcher has ended, from a daemon thread.

    The thread ends when the object of the method is garbage-collected, so that a process with many
    Trainers has few threads. A kill signal from the operating system at the death of the parent
    would be faster, but would leave temporary files behind.

    Args:
        end: Bound method that ends this process.
    """
    is_gone = launcher_is_gone(os.environ)
    if is_gone is None:
        return
    reference = weakref.WeakMethod(end)

    def poll_launcher() -> None:
        pause = threading.Event()
        while not is_gone():
            pause.wait(_POLL_SECONDS)
            if reference() is None:
                return
        method = reference()
        if method is not None:
            method()

    threading.Thread(target=poll_launcher, daemon=True, name="parent-watch").start()
