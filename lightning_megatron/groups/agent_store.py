"""The store in which the ranks of a job find each other, without what ranks of an earlier attempt left there."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_megatron.errors import RankMismatchError

_POLL_SECONDS = 0.02


def open_store(address: str, port: int, rank: int, size: int, timeout: timedelta, of_agent: bool) -> dist.Store:
    """Return the store that all ranks of the job see: that of the process group, if there is one.

    Args:
        address: Host of the store.
        port: Its port.
        rank: Global rank of this process; the first one keeps the store, unless torchrun does.
        size: Ranks of the job.
        timeout: How long to wait for the others.
        of_agent: Whether torchrun keeps the store.

    Raises:
        RankMismatchError: If the others do not come in time to a store of torchrun.

    Communication: every rank with the store.
    """
    if dist.is_initialized():
        return default_store()
    if of_agent:
        return join_agent_store(address, port, rank, size, timeout)
    return dist.TCPStore(address, port, size, rank == 0, timeout, multi_tenant=True)


def default_store() -> dist.Store:
    """Return the store of the process group of all ranks."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def join_agent_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a store that only the ranks of this attempt use.

    When torchrun starts the ranks again, its store outlives them. A rank that comes first would find the addresses that
    the previous ranks have left, and try to connect to processes that are gone. (torchrun counts its attempts, but
    every machine for itself.)

    Args:
        address: Host of torchrun's store.
        port: Its port.
        rank: Global rank of this process.
        size: Ranks of the job.
        timeout: How long to wait for the others.

    Raises:
        RankMismatchError: If they do not come in time.

    Communication: every rank with the first, through the store.
    """
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    name = agree_on_name(store, rank, size, timeout)
    return dist.PrefixStore(f"lightning_megatron/{name}", store)


def agree_on_name(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that the ranks which are alive agree on, whatever dead ones have left in the store.

    Every rank asks with a word of its own, which only a first rank that is alive can answer.

    Args:
        store: The store, which may hold questions and answers of earlier ranks.
        rank: This rank.
        size: Ranks that take part.
        timeout: How long to wait for the others.

    Raises:
        RankMismatchError: If they do not come in time.
    """
    asking = dist.PrefixStore("lightning_megatron", store)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _answer(asking, size, deadline)
    word = secrets.token_hex(8)
    asking.set(f"ask/{rank}", word)
    answer = f"answer/{word}"
    while not asking.check([answer]):
        _wait(deadline, "the first rank")
    name = asking.get(answer).decode()
    asking.add(f"{name}/arrived", 1)
    return name


def _answer(asking: dist.Store, size: int, deadline: float) -> str:
    """Tell every rank that asks the name of this attempt, until all have heard it."""
    name = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    while (arrived := asking.add(f"{name}/arrived", 0)) < size - 1:
        for rank in range(1, size):
            # A word of a dead rank is answered as well; that of its successor takes its place.
            if asking.check([f"ask/{rank}"]) and (word := asking.get(f"ask/{rank}")) != answered.get(rank):
                asking.set(f"answer/{word.decode()}", name)
                answered[rank] = word
        _wait(deadline, f"{size - 1 - arrived} of {size} ranks")
    return name


def _wait(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise RankMismatchError(
            f"all ranks must join the job: {whom} did not come in time. They have failed, or other machines have not "
            "been started. Look for the first failure, or give them more time with MegatronStrategy(timeout=...)."
        )
    time.sleep(_POLL_SECONDS)
