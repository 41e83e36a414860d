"""One trace of all ranks for Perfetto: the events of each rank on a common clock, with a row of
lanes for each rank, in the Trace Event Format (JSON).
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.pending import start_transfers
from lightning_megatron.strategy.profiling.step_parts import Interval

#: Categories of events that the trace keeps.
_KEPT = set(
    """
    cpu_op user_annotation gpu_user_annotation kernel gpu_memcpy gpu_memset cuda_runtime cuda_driver
    ac2g
    """.split()
)
#: Beginnings of names that the trace leaves out: transfers by gloo, which last until the host waits
#: for them; torch's range of an optimizer, which contains the whole step; and calls of modes that
#: see operators, within which a range may begin.
_LEFT_OUT = ("gloo:send", "gloo:recv", "Optimizer.step#", "PythonDispatchMode")
#: Lane of the steps; lanes of host threads and of streams follow.
_STEPS = 0
_FIRST_STREAM = 1000
_STREAM = "stream "
#: Names of the ranges of layers' backward passes.
_BACKWARD = re.compile(r"\S+, backward")
#: Distance of the numbers of two ranks' arrows, which are below it on one rank.
_ARROWS = 2**32
#: Number of exchanged times for each rank, of which the fastest counts.
_EXCHANGES = 9

Event = dict[str, Any]


def clock_offset(axis: MeshAxis) -> int:
    """Measure by how much this rank's clock is ahead of that of the first rank (ns).

    The first rank asks each other rank for its time, and takes the answer with the shortest round
    trip, which arrived in the middle of the trip up to half of its length. An offset below that is
    0, as between ranks of one host.

    Args:
        axis: The ranks, in a group for tensors on CPUs.

    Communication: ten round trips of a number between the first rank and each other one.
    """
    if axis.rank > 0:
        for _ in range(_EXCHANGES):
            _receive(axis, 0)
            _send(axis, 0, time.time_ns())
        return _receive(axis, 0)
    for peer in range(1, axis.size):
        answers = []
        for _ in range(_EXCHANGES):
            sent = time.time_ns()
            _send(axis, peer, 0)
            answer = _receive(axis, peer)
            trip = time.time_ns() - sent
            answers.append((trip, answer - sent - trip // 2))
        trip, offset = min(answers)
        _send(axis, peer, offset if abs(offset) > trip // 2 else 0)
    return 0


def _send(axis: MeshAxis, peer: int, value: int) -> None:
    start_transfers([(torch.tensor([value]), peer)], [], axis).wait()


def _receive(axis: MeshAxis, peer: int) -> int:
    value = torch.zeros(1, dtype=torch.int64)
    start_transfers([], [(value, peer)], axis).wait()
    return int(value)


def read_trace(path: Path, origin: int) -> list[Event]:
    """Read the events of a trace of torch's profiler.

    Args:
        path: The file.
        origin: Time on this rank's clock at which the trace of all ranks begins (ns).

    Returns:
        Events with times since the origin (µs). Ranges that were not closed are left out, because
        their end is unknown.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    # In whole numbers, because microseconds since 1970 leave a float no digit for nanoseconds.
    shift = (int(content.get("baseTimeNanoseconds", 0)) - origin) / 1e3
    events = []
    names: dict[Any, str] = {}
    for event in content["traceEvents"]:
        if event["name"] == "thread_name":
            # The second name of a thread is that of the process.
            names.setdefault(event["tid"], event["args"]["name"])
        is_open = event.get("args", {}).get("finished") is False
        is_left_out = is_open or event["name"].startswith(_LEFT_OUT)
        if event.get("cat") in _KEPT and not is_left_out:
            thread = names.get(event["tid"], f"thread {event['tid']}")
            events.append({**event, "ts": event["ts"] + shift, "thread": thread})
    # The main thread comes first, whose number is that of the process.
    return sorted(events, key=lambda event: event["tid"] != event["pid"])


def rows_of_rank(
    rank: int, title: str, events: Iterable[Mapping[str, Any]], steps: Mapping[str, Interval]
) -> list[Event]:
    """Return the events of a rank as one process of the trace of all ranks.

    Args:
        title: Name of the rank, such as ``rank 3: dp0 tp1 pp0``.
        events: Events of torch's profiler; see :func:`read_trace`.
        steps: Intervals of the steps, by name (µs).
    """
    lanes: dict[str, int] = {}
    rows = [_named("process_name", rank, 0, name=title), _sorted("process", rank, 0, rank)]
    rows += [_named("thread_name", rank, _STEPS, name="steps"), _sorted("thread", rank, _STEPS, 0)]
    for name, (start, stop) in steps.items():
        place = {"pid": rank, "tid": _STEPS}
        rows.append({"ph": "X", "cat": "step", "name": name, "ts": start, "dur": stop - start})
        rows[-1] |= place
    for event in events:
        lane = _lane_of(event)
        if lane not in lanes:
            lanes[lane] = len(lanes) + 1 + lane.startswith(_STREAM) * _FIRST_STREAM
            rows.append(_named("thread_name", rank, lanes[lane], name=lane))
            rows.append(_sorted("thread", rank, lanes[lane], lanes[lane]))
        moved = {**event, "pid": rank, "tid": lanes[lane]}
        del moved["thread"]
        if "id" in event:
            moved["id"] = rank * _ARROWS + int(event["id"])
        rows.append(moved)
    return rows


def _lane_of(event: Mapping[str, Any]) -> str:
    """Return the lane of an event. The events of a lane must not overlap without being nested.

    Ranges of backward passes begin and end inside of operators of autograd, and ranges on a stream
    where its kernels of several layers overlap.
    """
    category = event["cat"]
    if category.startswith(("kernel", "gpu_")) or (category == "ac2g" and event["ph"] == "f"):
        ranges = ", ranges" if category == "gpu_user_annotation" else ""
        return f"{_STREAM}{event['tid']}{ranges}"
    is_backward = category == "user_annotation" and _BACKWARD.fullmatch(event["name"])
    return f"{event['thread']}{', backward passes of layers' if is_backward else ''}"


def _named(kind: str, rank: int, lane: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": arguments}


def _sorted(kind: str, rank: int, lane: int, index: int) -> Event:
    return _named(f"{kind}_sort_index", rank, lane, sort_index=index)


def title_of(mesh: ParallelMesh) -> str:
    """Return the name of this rank with its coordinates, such as ``rank 3: dp0 tp1 pp0``."""
    coordinates = mesh.layout.coordinates(mesh.rank).items()
    return f"rank {mesh.rank}: " + " ".join(f"{axis}{index}" for axis, index in coordinates)


def gather_trace(rows: Sequence[Event], axis: MeshAxis, path: Path) -> None:
    """Write the events of all ranks into one file, on the first rank.

    The first rank holds the events of one other rank at a time.

    Args:
        rows: Events of this rank; see :func:`rows_of_rank`.
        axis: All ranks, in a group for tensors on CPUs.
        path: File of the trace (``.json.gz``).

    Raises:
        OSError: If the first rank cannot write the file, after all transfers.

    Communication: one gather of numbers, and a transfer from each other rank to the first one.
    """
    # Joined with commas, the lists of all ranks are one list.
    packed = gzip.compress(json.dumps(rows, separators=(",", ":"))[1:-1].encode(), 3)
    sizes = all_gather_objects(len(packed), axis)
    if axis.rank > 0:
        part = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        start_transfers([(part, 0)], [], axis).wait()
        return
    parts = _parts_of_all(packed, sizes, axis)
    try:
        with gzip.open(path, "wb", 3) as file:
            for text in parts:
                file.write(text)
    finally:
        # The other ranks wait until their events have arrived, even if the disk is full.
        deque(parts, maxlen=0)


def _parts_of_all(packed: bytes, sizes: Sequence[int], axis: MeshAxis) -> Iterator[bytes]:
    """Yield the text of the file, for which each other rank sends its part."""
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    yield gzip.decompress(packed)
    for peer in range(1, axis.size):
        part = torch.zeros(sizes[peer], dtype=torch.uint8)
        start_transfers([], [(part, peer)], axis).wait()
        yield b"," + gzip.decompress(part.numpy().tobytes())
    yield b"]}"
