"""Count of a step's launches on the host: graphs, and kernels one by one with their names.

A launch in a profiler trace has a correlation number, which the kernels that it starts have, too.
A launch belongs to the step in which its first kernel runs. The kernels of a graph all have the
number of its launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.step_profile import ON_DEVICE, Interval

#: Name of the launch of a graph.
GRAPH_LAUNCH = "cudaGraphLaunch"
#: Beginnings of the names of the calls that launch one kernel.
KERNEL_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")


@dataclass(frozen=True)
class Launch:
    """Call of the host that starts work on the device.

    Args:
        call: Name of the call, such as ``cudaGraphLaunch``.
        start: Start of its first kernel on the device (µs).
        kernels: Names of its kernels.
    """

    call: str
    start: float
    kernels: tuple[str, ...]

    @property
    def is_graph(self) -> bool:
        """Return whether it launches a graph."""
        return self.call.startswith(GRAPH_LAUNCH)

    @property
    def is_kernel(self) -> bool:
        """Return whether it launches one kernel."""
        return self.call.startswith(KERNEL_LAUNCHES)


def launches_of(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """Return the launches of a trace that started work, in the order of that work.

    Args:
        events: Events of a torch.profiler trace.
    """
    calls: dict[int, str] = {}
    started: dict[int, list[tuple[float, str]]] = {}
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("ph") != "X" or number is None:
            continue
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[number] = event["name"]
        elif event.get("cat") in ON_DEVICE:
            started.setdefault(number, []).append((float(event["ts"]), event["name"]))
    found = [
        Launch(calls[number], min(work)[0], tuple(name for _, name in work))
        for number, work in started.items()
        if number in calls
    ]
    return sorted(found, key=lambda launch: launch.start)


def count_launches(launches: Sequence[Launch], steps: Sequence[Interval]) -> dict[str, Any]:
    """Return the launches of a step as the mean over ``steps``.

    Args:
        launches: Launches of a trace.
        steps: Start and end of each step on the device (µs).

    Returns:
        ``calls``: number of each call; ``graphs`` and ``kernels``: number of launched graphs and of
        kernels launched one by one; ``in_graphs``: kernels that graphs launched; ``names``: number
        of each kernel launched one by one.
    """
    inside = [one for one in launches if any(begin <= one.start < end for begin, end in steps)]
    alone = [one for one in inside if one.is_kernel]
    graphs = [one for one in inside if one.is_graph]
    scale = 1 / max(len(steps), 1)

    def mean(counts: Counter[str]) -> dict[str, float]:
        return {name: round(number * scale, 2) for name, number in counts.most_common()}

    return {
        "calls": mean(Counter(one.call for one in inside)),
        "graphs": round(len(graphs) * scale, 2),
        "kernels": round(len(alone) * scale, 2),
        "in_graphs": round(sum(len(one.kernels) for one in graphs) * scale, 2),
        "names": mean(Counter(name for one in alone for name in one.kernels)),
    }
