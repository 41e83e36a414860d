"""What one of several processes does for all: writing files, and saying a refusal to the user."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

#: Variables in which torchrun, SLURM and MPI tell a process its rank.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: Time for which the ranks of a machine know what one of them has said (seconds).
_MEMORY_SECONDS = 300.0


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


def started_rank() -> str | None:
    """Return the rank that torchrun, SLURM or MPI gave this process; None for other processes."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), None)


def say_once(
    text: str,
    say: Callable[[], object],
    first_claim: Callable[[str, int, str, str], str] | None = None,
) -> None:
    """Say a refusal, unless another rank has said the same.

    Ranks that torchrun, SLURM or MPI started do not know each other before they have joined. Those
    of one machine have the same parent, by which they find what it has been told in one file. On
    several machines the store of torchrun's agents knows which said it first, and the others say
    one line that names it; without this store each machine says it, because a rank cannot know that
    another machine refuses the same. What only one rank refuses has another text, and is said.

    Args:
        text: The message, which is equal on ranks that refuse the same.
        say: Function that prints it.
        first_claim: Function of ``groups/agent_store.py``; None asks no other machine.
    """
    rank = started_rank()
    if rank is None:
        say()
        return
    now = time.time()
    content = sha256(text.encode()).hexdigest()
    path = Path(tempfile.gettempdir()) / f"lightning_megatron_{os.getuid()}_refusals"
    said: list[tuple[str, ...]] = []
    with ExitStack() as lock:
        # Without the file, as on a full disk, every rank says it.
        with suppress(OSError, ValueError):
            lock.enter_context(one_at_a_time(path))
            lines = map(str.split, path.read_text(encoding="utf-8").splitlines())
            whole = (tuple(line) for line in lines if len(line) == 4)
            said = [line for line in whole if now - float(line[0]) < _MEMORY_SECONDS]
        parent = str(os.getppid())
        if any(by != rank for _, at, by, what in said if (at, what) == (parent, content)):
            return
        here = f"{socket.gethostname()} (machine {os.environ.get('GROUP_RANK', '0')})"
        first = _first_machine(here, content, first_claim)
        if first == here:
            say()
        else:
            sys.stderr.write(f"{here} refuses the same as {first}, which says why\n")
        said.append((str(now), parent, rank, content))
        with suppress(OSError):
            path.write_text("\n".join(map(" ".join, said)), encoding="utf-8")


def _first_machine(
    here: str, content: str, first_claim: Callable[[str, int, str, str], str] | None
) -> str:
    """Return the machine that said a text first in this attempt of torchrun's job."""
    given = os.environ
    has_store = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if first_claim is not None and has_store and given.get("GROUP_WORLD_SIZE", "1") != "1":
        key = f"{given.get('TORCHELASTIC_RESTART_COUNT')}/{content}"
        with suppress(OSError, RuntimeError, ValueError, KeyError):
            return first_claim(given["MASTER_ADDR"], int(given["MASTER_PORT"]), key, here)
    return here
