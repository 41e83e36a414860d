"""Rendezvous store of a job's ranks, isolated from entries of earlier attempts."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_megatron.errors import RankMismatchError

_POLL_SECONDS = 0.02
#: Reads of the store by all waiting ranks together (1 / seconds).
_READS_PER_SECOND = 10_000
#: Time for which a process that is about to end waits for the store.
_SHORT = timedelta(seconds=5)


def open_store(
    address: str,
    port: int,
    rank: int,
    size: int,
    timeout: timedelta,
    use_agent_store: bool,
    listener: int | None = None,
) -> dist.Store:
    """Return the store that all ranks of the job share.

    If a process group already exists, return its store.

    Args:
        rank: Global rank of this process. Rank 0 runs the store, unless torchrun does.
        use_agent_store: Whether torchrun's agent runs the store.
        listener: File descriptor of a socket of rank 0 that listens on the port, which the store
            owns from then on; None lets the store open a socket.

    Communication: every rank with the store.
    """
    if dist.is_initialized():
        return default_store()
    if use_agent_store:
        return join_agent_store(address, port, rank, size, timeout)
    return dist.TCPStore(
        address, port, size, rank == 0, timeout, multi_tenant=True, master_listen_fd=listener
    )


def default_store() -> dist.Store:
    """Return the store of the process group of all ranks."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def join_agent_store(
    address: str, port: int, rank: int, size: int, timeout: timedelta
) -> dist.Store:
    """Return a store that only the ranks of this attempt use.

    When torchrun restarts the ranks, its store survives. A rank that starts early would find the
    addresses of the previous ranks and try to connect to processes that no longer exist. torchrun's
    own count of attempts does not help, because every host counts separately.

    Communication: every rank with rank 0, through the store.
    """
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    name = agree_on_name(store, rank, size, timeout)
    return dist.PrefixStore(f"lightning_megatron/{name}", store)


def first_claim(address: str, port: int, key: str, value: str) -> str:
    """Return the value that a process of the job gave a key first, which is this one if none has.

    Args:
        address: Host of the store of torchrun's agent.

    Raises:
        RuntimeError: If the store does not answer within five seconds.
    """
    store = dist.TCPStore(address, port, is_master=False, timeout=_SHORT, wait_for_workers=False)
    claims = dist.PrefixStore("lightning_megatron/claims", store)
    first: bytes = claims.compare_set(key, "", value)
    return first.decode()


def agree_on_name(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all running ranks agree on, regardless of old entries in the store.

    Every rank writes a random word, which only a running rank 0 can answer.
    """
    entries = dist.PrefixStore("lightning_megatron", store)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _answer(entries, size, deadline)
    word = secrets.token_hex(8)
    entries.set(f"ask/{entries.add('asked', 1)}", word)
    answer = f"answer/{word}"
    while not entries.check([answer]):
        _wait(deadline, "the first rank", size / _READS_PER_SECOND)
    name = entries.get(answer).decode()
    entries.add(f"{name}/arrived", 1)
    return name


def _answer(entries: dist.Store, size: int, deadline: float) -> str:
    """Answer every word with the name of this attempt, until all ranks have read it.

    Words of ranks that died are answered, too.
    """
    name = secrets.token_hex(8)
    first = 1
    waiting: list[str] = []
    while (arrived := entries.add(f"{name}/arrived", 0)) < size - 1:
        last = entries.add("asked", 0)
        waiting += [f"ask/{number}" for number in range(first, last + 1)]
        first = last + 1
        # A rank may have died between its count and its word.
        written = [key for key in waiting if entries.check([key])]
        for word in entries.multi_get(written) if written else ():
            entries.set(f"answer/{word.decode()}", name)
        waiting = [key for key in waiting if key not in set(written)]
        _wait(deadline, f"{size - 1 - arrived} of {size} ranks")
    return name


def _wait(deadline: float, missing: str, pause: float = 0.0) -> None:
    if time.monotonic() > deadline:
        raise RankMismatchError(
            f"all ranks must join the job: {missing} did not join in time. These processes failed, "
            "or other machines were not started. Look for the first failure, or allow more time "
            "with job.timeout of MegatronStrategy."
        )
    time.sleep(max(_POLL_SECONDS, pause))
