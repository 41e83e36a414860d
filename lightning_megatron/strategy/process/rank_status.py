"""Status of each rank of a job, and the ranks that others wait for."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType

from lightning_megatron.groups.journal import Call, DeviceProgress, Journal

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARY_PATHS = (
    _PACKAGE,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)
#: Files of the innermost frame of a main thread that waits for other ranks.
_WAITING = (
    str(Path("torch", "distributed", "distributed_c10d.py")),
    str(Path("lightning_megatron", "groups")) + os.sep,
)
_NUM_LINES = 4
#: Number of waiting ranks that a report lists.
_NUM_WAITING = 64


@dataclass(frozen=True)
class RankStatus:
    """State of one rank: its code location, collectives and progress.

    Args:
        rank: Global rank.
        start_time: Start time of the process in system ticks; distinguishes it from a later process
            with the same ``pid``.
        time: Time of this report, by the clock of the host (seconds).
        activity: State of the Trainer, such as ``train, global_step 12``.
        device: Place of the device in the graphs that the host has launched; None without graphs.
    """

    rank: int
    host: str
    pid: int
    start_time: str
    number: int
    time: float
    activity: str
    waits: bool
    call: Call | None
    counts: dict[str, int] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    device: DeviceProgress | None = None

    @classmethod
    def observe(cls, rank: int, number: int, activity: str, journal: Journal) -> RankStatus:
        """Return the status of this process's main thread."""
        inner = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if inner is None else [frame for frame, _ in traceback.walk_stack(inner)]
        pid = os.getpid()
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=pid,
            start_time=start_time_of(pid),
            number=number,
            time=time.time(),
            activity=activity,
            waits=bool(frames) and any(part in frames[0].f_code.co_filename for part in _WAITING),
            call=journal.last,
            # Copy in one atomic operation, because the main thread keeps counting.
            counts=dict(journal.counts),
            lines=_interesting_lines(frames),
            device=None if journal.device is None else journal.device.progress,
        )

    @property
    def progress(self) -> tuple[object, ...]:
        """Return a value that changes whenever the rank makes progress."""
        return self.activity, self.waits, self.call, sum(self.counts.values()), self.device

    def to_text(self) -> str:
        """Return this status as JSON, with the ranks of large groups as a few ranges."""
        values = asdict(self)
        if self.call is not None:
            values["call"] = (*self.call[:-1], _ranges_of(self.call.ranks))
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str) -> RankStatus:
        """Return the status that :meth:`to_text` has written."""
        values = json.loads(text)
        if values["call"] is not None:
            kind, axis, number, ranges = values["call"]
            ranks = chain.from_iterable(range(*arguments) for arguments in ranges)
            values["call"] = Call(kind, axis, number, tuple(ranks))
        if values["device"] is not None:
            values["device"] = DeviceProgress(*values["device"])
        return cls(**values | {"lines": tuple(values["lines"])})


def _ranges_of(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the arguments of ranges that together yield the ranks."""
    ranges = []
    start = 0
    while start < len(ranks):
        step = (ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 1) or 1
        stop = start + 1
        while stop < len(ranks) and ranks[stop] == ranks[stop - 1] + step:
            stop += 1
        ranges.append((ranks[start], ranks[stop - 1] + (1 if step > 0 else -1), step))
        start = stop
    return ranges


def _interesting_lines(frames: Sequence[FrameType]) -> tuple[str, ...]:
    user_frames = [
        frame for frame in frames if not frame.f_code.co_filename.startswith((*_LIBRARY_PATHS, "<"))
    ]
    others = [frame for frame in user_frames if frame is not frames[0]]
    chosen = [*frames[:1], *others[: _NUM_LINES - 1]]
    return tuple(
        f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in chosen
    )


def start_time_of(pid: int) -> str:
    """Return a local process's start time in system ticks; empty if it is gone or hidden."""
    try:
        # The process name may contain spaces and parentheses. After it, the first field is the
        # state and the twentieth the start time.
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # A killed process stays in the process table until its parent reads the exit code.
    return "" if fields[0] in ("Z", "X") else fields[19]


def missing_ranks(
    statuses: Mapping[int, RankStatus], silent: Iterable[int], num_ranks: int
) -> list[int]:
    """Return the ranks that the others wait for.

    A rank blocks the collectives of its groups if it is silent or is not inside a collective.
    Waiting ranks are reported only if no other rank is missing: they are then inside mismatched
    collectives.

    Args:
        silent: Ranks without a recent report.
    """
    silent = set(silent) | (set(range(num_ranks)) - statuses.keys())
    waiting = {rank for rank, status in statuses.items() if status.waits and rank not in silent}
    wanted: set[int] = set()
    # The ranks of a group wait in one call, which has the same numbers for all of them.
    calls = (statuses[rank].call for rank in waiting)
    for call in {(call.axis, call.number, call.ranks): call for call in calls if call}.values():
        for other in call.ranks:
            if other in silent or not _has_arrived(statuses[other], call):
                wanted.add(other)
    # Collectives that do not go through a mesh, such as those of torch's own checkpoints, are not
    # counted.
    wanted = wanted or set(range(num_ranks)) - waiting
    return sorted(wanted - waiting or wanted)


def _has_arrived(status: RankStatus, call: Call) -> bool:
    return status.waits if call.is_exchange else status.counts.get(call.axis, 0) >= call.number


def is_ahead(waiting: RankStatus, statuses: Mapping[int, RankStatus]) -> bool:
    """Return whether a rank has started a collective that a rank of its group has not."""
    call = waiting.call
    if call is None or call.is_exchange:
        return False
    return any(not _has_arrived(statuses[rank], call) for rank in call.ranks if rank in statuses)


def hang_report(
    statuses: Mapping[int, RankStatus], missing: Iterable[int], ages: Mapping[int, float]
) -> str:
    """Return the message that describes a hanging job.

    Args:
        ages: Time since the last report of each silent rank (seconds).
    """
    missing = set(missing)
    lines = ["did not arrive:"]
    for rank in sorted(missing):
        if rank not in statuses:
            lines.append(f"  rank {rank} has never reported its status")
            continue
        status = statuses[rank]
        silence = f", no status report for {ages[rank]:.0f} s" if rank in ages else ""
        called = "no collective yet" if status.call is None else f"last collective: {_name(status)}"
        lines.append(
            f"  rank {rank} ({status.host}, process {status.pid}): {status.activity}{silence}; "
            f"{called}{_device_words(status)}"
        )
        lines += [
            f"      {'at' if index == 0 else 'from'} {line}"
            for index, line in enumerate(status.lines)
        ]
    lines.append("wait for them:")
    waiting = [
        f"  rank {rank}: {status.activity}; in {_name(status)}{_device_words(status)}"
        for rank, status in sorted(statuses.items())
        if rank not in missing and status.waits
    ]
    lines += waiting[:_NUM_WAITING]
    if len(waiting) > _NUM_WAITING:
        lines.append(f"  and {len(waiting) - _NUM_WAITING} other ranks")
    return "\n".join(lines)


def _device_words(status: RankStatus) -> str:
    return "" if status.device is None else f"; {status.device}"


def _name(status: RankStatus) -> str:
    call = status.call
    if call is None:
        return "a collective"
    ranks = ", ".join(map(str, call.ranks[:16])) + (", ..." if len(call.ranks) > 16 else "")
    return f"{call.kind} over {call.axis} (number {call.number} there, ranks {ranks})"
