"""Compare what every rank believes before any rank computes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects

Fields = Mapping[str, str | int | float | None]

#: How long rank 0, which may keep the store, waits until the others have read that the job cannot run.
_READING = timedelta(seconds=30)
#: How often a rank that waits looks whether the one it waits for has another layout (seconds).
_LOOK = 1.0


def check_same_everywhere(world: MeshAxis, fields: Fields) -> None:
    """Compare named values over all ranks of ``world``.

    Args:
        world: An axis with all ranks, on CPU.
        fields: Values that must be equal everywhere, by name.

    Raises:
        RankMismatchError: On every rank, naming the ranks and fields that differ from the majority.

    Communication: one gather of objects over ``world``.
    """
    everyone = all_gather_objects(dict(fields), world)
    complaint = _complaint(everyone, [f"rank {rank}" for rank in world.ranks])
    if complaint is not None:
        raise RankMismatchError(complaint)


def check_same_in_store(store: dist.Store, rank: int, ranks: Sequence[int], fields: Fields, patience: timedelta) -> int:
    """Compare named values over ranks that have no group yet.

    The first rank reads the values of all, and tells each of them the result.

    Args:
        store: Where the ranks find each other.
        rank: Global rank of this process.
        ranks: Global ranks that take part, this one among them.
        fields: Values that must be equal everywhere, by name.
        patience: How long to wait for the others.

    Returns:
        How many comparisons these ranks have begun before in this store.

    Raises:
        RankMismatchError: On every rank, naming the ranks, their hosts and the fields that differ from the majority; or
            if ranks do not come in time.

    Communication: every rank with the first, through the store.
    """
    among = f"{ranks[0]} to {ranks[-1]}"
    everything = dist.PrefixStore("lightning_megatron/same", store)
    everything.set(f"open/{rank}", json.dumps([ranks[0], ranks[-1]]))
    own = dist.PrefixStore(among, everything)
    number = own.add(f"begun/{rank}", 1)
    own.set(f"fields/{rank}/{number}", json.dumps([socket.gethostname(), dict(fields)]))
    if rank == ranks[0]:
        waiting = _Waiting(everything, rank, ranks, patience)
        found = [json.loads(waiting.read(own, f"fields/{other}/{number}", [other])) for other in ranks]
        hosts = [host for host, _ in found]
        one_host = len(set(hosts)) == 1
        names = [f"rank {r}" + ("" if one_host else f" on {host}") for r, host in zip(ranks, hosts, strict=True)]
        complaint = _complaint([values for _, values in found], names)
        for other in ranks:
            own.set(f"result/{other}/{number}", complaint or "")
        if complaint is not None:
            _wait_for_readers(own, ranks, number)
    result = _Waiting(everything, rank, ranks, patience).read(own, f"result/{rank}/{number}", ranks[:1])
    everything.set(f"open/{rank}", "[]")
    if result:
        own.set(f"read/{rank}/{number}", "")
        raise RankMismatchError(result)
    return number - 1


class _Waiting:
    """Wait for other ranks, but not for those that wait for this one in vain.

    Args:
        store: Where every rank says which ranks it compares itself with at the moment.
        rank: This rank.
        ranks: The ranks that it compares itself with.
        patience: How long to wait.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], patience: timedelta) -> None:
        self._store, self._rank, self._ends = store, rank, [ranks[0], ranks[-1]]
        self._patience = patience
        self._deadline = time.monotonic() + patience.total_seconds()

    def read(self, store: dist.Store, key: str, others: Sequence[int]) -> str:
        """Return what one of ``others`` writes."""
        while True:
            left = self._deadline - time.monotonic()
            try:
                store.wait([key], timedelta(seconds=max(min(left, _LOOK), 0.001)))
            except RuntimeError as error:
                if not _is_timeout(error):
                    raise
                for other in others:
                    self._check_layout_of(other)
                if left > 0:
                    continue
                raise RankMismatchError(
                    f"all ranks must join the job: rank {others[0]} did not come within "
                    f"{self._patience.total_seconds():g} s. It has failed, or another machine has not been started. "
                    "Look for the first failure, or give the ranks more time with MegatronStrategy(timeout=...)."
                ) from error
            return store.get(key).decode()

    def _check_layout_of(self, other: int) -> None:
        """Raise if another rank waits for this one with other ends of the layout."""
        if not self._store.check([f"open/{other}"]):
            return
        ends = json.loads(self._store.get(f"open/{other}"))
        if ends and ends != self._ends and ends[0] <= self._rank <= ends[1]:
            raise RankMismatchError(
                f"all ranks of a layout must have the same layout: that of rank {self._rank} has ranks {self._ends[0]} "
                f"to {self._ends[1]}, that of rank {other} ranks {ends[0]} to {ends[1]}. They would wait for each "
                "other. Give both the same world_size and rank_offset."
            )


def _wait_for_readers(store: dist.Store, ranks: Sequence[int], number: int) -> None:
    """Keep the store open until all others know what is wrong: with this process it may end."""
    others = [f"read/{rank}/{number}" for rank in ranks[1:]]
    try:
        store.wait(others, _READING)
    except RuntimeError as error:
        if not _is_timeout(error):
            raise
        # Who has not read by now has failed by itself.
        return


def _is_timeout(error: RuntimeError) -> bool:
    """Return whether a store has waited in vain; one in a file has no error class of its own for that."""
    return isinstance(error, dist.DistStoreError) or "timeout" in str(error).lower()


def _complaint(everyone: Sequence[Fields], ranks: Sequence[str]) -> str | None:
    """Return what is wrong with the values of all ranks, None if they are equal."""
    names = list(dict.fromkeys(name for one in everyone for name in one))
    complaints = []
    for name in names:
        values = [repr(one[name]) if name in one else "missing" for one in everyone]
        # The majority is taken as right; with a tie, rank 0 is.
        expected = max(dict.fromkeys(values), key=values.count)
        complaints += [
            f"{ranks[position]} has {name}={value}, the others {expected}"
            for position, value in enumerate(values)
            if value != expected
        ]
    if not complaints:
        return None
    shown = "; ".join(complaints[:8]) + (f"; and {len(complaints) - 8} more" if len(complaints) > 8 else "")
    return (
        f"all ranks must be started with the same configuration, versions and data: {shown}. A job whose ranks "
        "disagree hangs or trains something else. Start every rank with the same command, environment and files."
    )
