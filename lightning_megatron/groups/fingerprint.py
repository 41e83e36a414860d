"""Comparison of configurations and of the source files over all ranks before any rank computes."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch.distributed as dist

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects

_PACKAGE = Path(__file__).parents[1]
Fields = Mapping[str, str | int | float | None]
_REMEDY = "Start every rank with the same command, environment and files."
#: Time for which rank 0 waits until the other ranks have read the failure. The store may end with
#: rank 0.
_READING = timedelta(seconds=30)
#: Shortest and longest interval between reads of the store by a waiting rank (seconds).
_MIN_PAUSE_SECONDS = 0.002
_MAX_PAUSE_SECONDS = 0.5


def digest_of_sources(folder: Path) -> str:
    """Return a hash of the names and contents of all Python files below a folder, 12 hex digits."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@cache
def package_hash() -> str:
    """Return the hash of this package's files, computed once per process."""
    return digest_of_sources(_PACKAGE)


def check_same_everywhere(
    world: MeshAxis, fields: Fields, remedy: str = _REMEDY, *, part: int = 0
) -> None:
    """Check that named values are equal on all ranks of ``world``.

    Args:
        world: Axis with all ranks, on CPU.
        remedy: Last sentence of the error text: what the user should do if values differ.
        part: Number of a part of ``world``. Only ranks of one part need equal values.

    Raises:
        RankMismatchError: On every rank; the message names the ranks and fields that differ from
            the majority.

    Communication: one gather of a digest over ``world``; one of the values if digests differ.
    """
    text = repr(sorted(fields.items()))
    digests = set(all_gather_objects((part, blake2b(text.encode()).hexdigest()), world))
    if len(digests) == len({number for number, _ in digests}):
        return
    by_rank = dict(zip(world.ranks, all_gather_objects((part, dict(fields)), world), strict=True))
    for differing in sorted({number for number, _ in digests}):
        members = {
            rank: values for rank, (number, values) in by_rank.items() if number == differing
        }
        complaint = _describe_differences(
            list(members.values()), [f"rank {rank}" for rank in members], remedy
        )
        if complaint is not None:
            raise RankMismatchError(complaint)


def check_same_in_store(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    fields: Fields,
    patience: timedelta,
    remedy: str = _REMEDY,
) -> int:
    """Check that named values are equal on ranks that have no process group yet.

    The first rank reads the values of all ranks and sends the result to each of them.

    Returns:
        The number of comparisons that these ranks have started before in this store.

    Raises:
        RankMismatchError: On every rank, if values differ or ranks do not arrive in time. The
            message names the ranks, their hosts and the fields that differ from the majority.

    Communication: every rank with the first one, through the store.
    """
    prefix = f"{ranks[0]} to {ranks[-1]}"
    all_entries = dist.PrefixStore("lightning_megatron/same", store)
    all_entries.set(f"open/{rank}", json.dumps([ranks[0], ranks[-1]]))
    entries = dist.PrefixStore(prefix, all_entries)
    number = entries.add(f"begun/{rank}", 1)
    entries.set(f"fields/{rank}/{number}", json.dumps([socket.gethostname(), dict(fields)]))
    if rank == ranks[0]:
        waiting = _Waiting(all_entries, rank, ranks, patience)
        answers = [
            json.loads(waiting.read(entries, f"fields/{writer}/{number}", [writer]))
            for writer in ranks
        ]
        hosts = [host for host, _ in answers]
        is_one_host = len(set(hosts)) == 1
        names = [
            f"rank {r}" + ("" if is_one_host else f" on {host}")
            for r, host in zip(ranks, hosts, strict=True)
        ]
        complaint = _describe_differences([values for _, values in answers], names, remedy)
        for reader in ranks:
            entries.set(f"result/{reader}/{number}", complaint or "")
        if complaint is not None:
            _wait_for_readers(entries, ranks, number)
    result = _Waiting(all_entries, rank, ranks, patience).read(
        entries, f"result/{rank}/{number}", ranks[:1]
    )
    all_entries.set(f"open/{rank}", "[]")
    if result:
        entries.set(f"read/{rank}/{number}", "")
        raise RankMismatchError(result)
    return number - 1


class _Waiting:
    """Wait for other ranks, and raise if one of them waits for this rank with another layout.

    ``store`` is where every rank names the ranks that it is waiting for.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], patience: timedelta
    ) -> None:
        self._store = store
        self._rank = rank
        self._ends = [ranks[0], ranks[-1]]
        self._patience = patience
        self._deadline = time.monotonic() + patience.total_seconds()

    def read(self, store: dist.Store, key: str, others: Sequence[int]) -> str:
        """Return the value of a key that one of ``others`` writes."""
        pause = _MIN_PAUSE_SECONDS
        # Poll, because the client of the store logs every wait that ends without a key.
        while not store.check([key]):
            for writer in others:
                self._check_layout_of(writer)
            if time.monotonic() > self._deadline:
                raise RankMismatchError(
                    f"all ranks must join the job: rank {others[0]} did not join within "
                    f"{self._patience.total_seconds():g} s. It failed, or another machine was not "
                    "started. Look for the first failure, or allow more time with "
                    "job.timeout of MegatronStrategy."
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        return store.get(key).decode()

    def _check_layout_of(self, rank: int) -> None:
        if not self._store.check([f"open/{rank}"]):
            return
        ends = json.loads(self._store.get(f"open/{rank}"))
        if ends and ends != self._ends and ends[0] <= self._rank <= ends[1]:
            raise RankMismatchError(
                "all ranks of a layout must create the same layout: the layout of rank "
                f"{self._rank} has ranks {self._ends[0]} to {self._ends[1]}, the layout of rank "
                f"{rank} has ranks {ends[0]} to {ends[1]}. Give both the same world_size and "
                "rank_offset."
            )


def _wait_for_readers(store: dist.Store, ranks: Sequence[int], number: int) -> None:
    """Wait until all other ranks have read the failure: the store may end with this process."""
    others = [f"read/{rank}/{number}" for rank in ranks[1:]]
    try:
        store.wait(others, _READING)
    except RuntimeError as error:
        if not _is_timeout(error):
            raise
        # A rank that has not read the result by now has failed for another reason.
        return


def _is_timeout(error: RuntimeError) -> bool:
    """Return whether the error is a store's timeout; a file store has no error class for it."""
    return isinstance(error, dist.DistStoreError) or "timeout" in str(error).lower()


def _describe_differences(
    fields_of_ranks: Sequence[Fields], ranks: Sequence[str], remedy: str = _REMEDY
) -> str | None:
    """Return a description of the values that differ between ranks, None if all are equal."""
    names = list(dict.fromkeys(name for fields in fields_of_ranks for name in fields))
    complaints = []
    for name in names:
        values = [repr(fields[name]) if name in fields else "missing" for fields in fields_of_ranks]
        # The most frequent value counts as correct; in a tie, the one of the lowest rank.
        expected = max(dict.fromkeys(values), key=values.count)
        complaints += [
            f"{ranks[position]} has {name}={value}, the others {expected}"
            for position, value in enumerate(values)
            if value != expected
        ]
    if not complaints:
        return None
    shown = "; ".join(complaints[:8]) + (
        f"; and {len(complaints) - 8} more" if len(complaints) > 8 else ""
    )
    return (
        f"all ranks must be started with the same configuration, versions and data: {shown}. "
        f"Otherwise the job hangs, or trains another model. {remedy}"
    )
