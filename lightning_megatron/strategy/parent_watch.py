"""Exit of a rank whose launcher has died."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping

from lightning_megatron.strategy.positions import birth_of

#: Set for the processes that our launcher starts: its process, and when that began.
LAUNCHER = "LIGHTNING_MEGATRON_LAUNCHER"
#: Set by torchrun for its workers.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_POLL_SECONDS = 0.25


def launcher_mark() -> str:
    """Return a mark that identifies this process as a launcher."""
    return f"{os.getpid()} {birth_of(os.getpid())}"


def launcher_is_gone(environment: Mapping[str, str]) -> Callable[[], bool] | None:
    """Return a check of whether this process's launcher has ended; None without a launcher.

    Launchers are ours, torchrun's agent, and a process that uses ``multiprocessing``.

    Args:
        environment: Variables of this process.
    """
    parent, spawner = os.getppid(), multiprocessing.parent_process()
    if spawner is not None:
        return lambda: not spawner.is_alive()
    pid, _, birth = environment.get(LAUNCHER, "").partition(" ")
    if pid and pid != str(parent):
        # It ended before this process could look, or it launched the process that has launched this one.
        return lambda: bool(birth) and birth_of(int(pid)) != birth
    if pid or (environment.get(_TORCHRUN) and parent != 1):
        return lambda: os.getppid() != parent
    return None


def watch_launcher(end: Callable[[], None]) -> None:
    """Call a function soon after the launcher has ended, from a thread that lives as long as this process.

    The system could kill this process at once instead, which would leave its temporary files behind.

    Args:
        end: Ends this process.
    """
    is_gone = launcher_is_gone(os.environ)
    if is_gone is None:
        return

    def look() -> None:
        never = threading.Event()
        while not is_gone():
            never.wait(_POLL_SECONDS)
        end()

    threading.Thread(target=look, daemon=True, name="parent-watch").start()
