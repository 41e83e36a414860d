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
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_megatron.errors import RankMismatchError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects, all_reduce_

_PACKAGE = Path(__file__).parents[1]
Fields = Mapping[str, str | int | float | None]
_REMEDY = "Start every rank with the same command, environment and files."
#: Time that the first rank allows the others to read a failure, because the store may end with it,
#: and that the others allow the first rank to name the ranks that did not join.
_READING_SECONDS = 30.0
#: Shortest interval between reads of the store by a waiting rank, and the longest one of few ranks
#: (seconds).
_MIN_PAUSE_SECONDS = 0.002
_MAX_PAUSE_SECONDS = 0.5
#: Reads of the store by all waiting ranks together, three at a time (1 / seconds).
_READS_PER_SECOND = 10_000


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
    world: MeshAxis,
    fields: Fields,
    remedy: str = _REMEDY,
    *,
    part: int = 0,
    num_parts: int = 1,
) -> None:
    """Check that named values are equal on all ranks of ``world``.

    Args:
        world: Axis with all ranks, on CPU.
        remedy: Last sentence of the error text: what the user should do if values differ.
        part: Number of a part of ``world``. Only ranks of one part need equal values.
        num_parts: Number of parts, the same on all ranks; some of them may have no ranks.

    Raises:
        RankMismatchError: On every rank; the message names the ranks and fields that differ from
            the majority.

    Communication: one all-reduce of digests over ``world``; one gather of values if they differ.
    """
    text = repr(sorted(fields.items()))
    digest = int.from_bytes(blake2b(text.encode(), digest_size=7).digest())
    # The largest of a number and of its negation give both the largest and the smallest one.
    extremes = torch.full((num_parts, 2), -(2**60))
    extremes[part] = torch.tensor([digest, -digest])
    largest, smallest = all_reduce_(extremes, world, "max").unbind(1)
    if not (largest > -smallest).any():
        return
    by_rank = dict(zip(world.ranks, all_gather_objects((part, dict(fields)), world), strict=True))
    for differing in range(num_parts):
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

    The ranks count themselves and those with the same values. The last one knows the result; only
    if values differ, it reads them.

    Returns:
        The number of comparisons that these ranks have started before in this store.

    Raises:
        RankMismatchError: On every rank, if values differ or ranks do not arrive in time. The
            message names the ranks, their hosts and the fields that differ from the majority.

    Communication: eight requests of every rank to the store, and three after each pause.
    """
    all_entries = dist.PrefixStore("lightning_megatron/same", store)
    comparison = _Comparison(all_entries, rank, ranks, patience)
    values = json.dumps(dict(fields))
    all_entries.set(f"open/{rank}", json.dumps([ranks[0], ranks[-1]]))
    number = comparison.begin(json.dumps([socket.gethostname(), dict(fields)]))
    same = f"same/{blake2b(values.encode()).hexdigest()[:16]}"
    num_same = comparison.entries.add(same, 1)
    if comparison.entries.add("arrived", 1) == len(ranks):
        # An earlier rank may have counted itself just now.
        num_same = comparison.entries.add(same, 0)
        comparison.decide("" if num_same == len(ranks) else comparison.describe(remedy))
    complaint = comparison.result()
    all_entries.set(f"open/{rank}", "[]")
    if complaint:
        comparison.wait_for_readers()
        raise RankMismatchError(complaint)
    return number - 1


class _Comparison:
    """One comparison of the values of some ranks, in the store.

    Args:
        store: Store in which every rank names the ranks that it is waiting for.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], patience: timedelta
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._ends = [ranks[0], ranks[-1]]
        self._patience = patience.total_seconds()
        #: Entries of this comparison, which only the ranks of one layout share.
        self.entries = dist.PrefixStore(f"{ranks[0]} to {ranks[-1]}", store)

    def begin(self, values: str) -> int:
        """Write the values of this rank, and return the number of this comparison, from 1."""
        number = self.entries.add(f"begun/{self._rank}", 1)
        self.entries = dist.PrefixStore(str(number), self.entries)
        self.entries.set(f"fields/{self._rank}", values)
        return number

    def decide(self, complaint: str) -> None:
        """Tell all ranks the result; the first decision counts."""
        if self.entries.add("decided", 1) == 1:
            self.entries.set("result", complaint)

    def describe(self, remedy: str) -> str:
        """Return what differs between the ranks, which all have written their values."""
        answers = list(
            map(json.loads, self.entries.multi_get([f"fields/{rank}" for rank in self._ranks]))
        )
        is_one_host = len({host for host, _ in answers}) == 1
        names = [
            f"rank {rank}" + ("" if is_one_host else f" on {host}")
            for rank, (host, _) in zip(self._ranks, answers, strict=True)
        ]
        return _describe_differences([values for _, values in answers], names, remedy) or ""

    def result(self) -> str:
        """Return the decision: what differs, or which rank did not join; empty without either.

        Raises:
            RankMismatchError: If one of the ranks waits for this rank with another layout.
        """
        is_first = self._rank == self._ranks[0]
        # The first rank looks at one other rank after another, the others at the first one.
        watched = cycle(self._ranks if is_first else self._ranks[:1])
        longest = max(_MAX_PAUSE_SECONDS, 3 * len(self._ranks) / _READS_PER_SECOND)
        pause = max(_MIN_PAUSE_SECONDS, len(self._ranks) / _READS_PER_SECOND)
        begun = time.monotonic()
        # Poll, because the client of the store logs every wait that ends without a key.
        while not self.entries.check(["result"]):
            self._check_layout_of(next(watched))
            late = time.monotonic() - begun - self._patience
            if late > 0 and is_first:
                self.decide(self._did_not_join(self._missing_rank()))
            elif late > min(_READING_SECONDS, self._patience):
                raise RankMismatchError(self._did_not_join(self._ranks[0]))
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self.entries.get("result").decode()

    def wait_for_readers(self) -> None:
        """Wait on the first rank until all others have read the failure.

        A rank that has not read it by then has failed for another reason.
        """
        num_read = self.entries.add("read", 1)
        deadline = time.monotonic() + _READING_SECONDS
        while self._rank == self._ranks[0] and time.monotonic() < deadline:
            if num_read >= self.entries.add("arrived", 0):
                return
            time.sleep(_MIN_PAUSE_SECONDS)
            num_read = self.entries.add("read", 0)

    def _missing_rank(self) -> int:
        for rank in self._ranks:
            if not self.entries.check([f"fields/{rank}"]):
                return rank
        return self._ranks[-1]

    def _did_not_join(self, rank: int) -> str:
        return (
            f"all ranks must join the job: rank {rank} did not join within "
            f"{self._patience:g} s. It failed, or another machine was not "
            "started. Look for the first failure, or allow more time with "
            "job.timeout of MegatronStrategy."
        )

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
