"""Launches of a step by the host: CUDA graphs, and single kernels by name.

In a profiler trace, a launch and the kernels that it starts share a correlation number. All kernels
of a graph have the number of the graph's launch. A launch belongs to the step in which its first
kernel runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.step_profile import ON_DEVICE, Interval

#: Name of the call that launches a graph.
GRAPH_LAUNCH = "cudaGraphLaunch"
#: Prefixes of the names of calls that launch one kernel.
KERNEL_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")


@dataclass(frozen=True)
class Launch:
    """Call of the host that starts work on the device.

    Args:
        call: Name of the call, such as ``cudaGraphLaunch``.
        start: Start of the first launched kernel on the device (µs).
        kernels: Names of the launched kernels.
    """

    call: str
    start: float
    kernels: tuple[str, ...]

    @property
    def is_graph(self) -> bool:
        """Return whether the call launches a graph."""
        return self.call.startswith(GRAPH_LAUNCH)

    @property
    def is_kernel(self) -> bool:
        """Return whether the call launches one kernel."""
        return self.call.startswith(KERNEL_LAUNCHES)


def launches_of(events: Iterable[dict[str, Any]]) -> list[Launch]:
    """Return the launches in a trace, ordered by the start of their first kernel.

    Args:
        events: Events of a torch.profiler trace.
    """
    calls: dict[int, str] = {}
    kernels: dict[int, list[tuple[float, str]]] = {}
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if event.get("ph") != "X" or correlation is None:
            continue
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[correlation] = event["name"]
        elif event.get("cat") in ON_DEVICE:
            kernels.setdefault(correlation, []).append((float(event["ts"]), event["name"]))
    launches = []
    for correlation, group in kernels.items():
        if correlation in calls:
            names = tuple(name for _, name in group)
            launches.append(Launch(calls[correlation], min(group)[0], names))
    return sorted(launches, key=lambda launch: launch.start)


def count_launches(launches: Sequence[Launch], steps: Sequence[Interval]) -> dict[str, Any]:
    """Count the launches of a step, as the mean over ``steps``.

    Args:
        launches: Launches of a trace.
        steps: Start and end of each step on the device (µs).

    Returns:
        ``calls``: number of launches by name of the call; ``graphs``: number of graph launches;
        ``kernels``: number of single-kernel launches; ``in_graphs``: number of kernels inside
        graphs; ``names``: number of single-kernel launches by kernel name.
    """
    in_steps = []
    for launch in launches:
        if any(begin <= launch.start < end for begin, end in steps):
            in_steps.append(launch)
    single_launches = [launch for launch in in_steps if launch.is_kernel]
    graphs = [launch for launch in in_steps if launch.is_graph]
    scale = 1 / max(len(steps), 1)

    def mean(counts: Counter[str]) -> dict[str, float]:
        return {name: round(number * scale, 2) for name, number in counts.most_common()}

    calls = Counter(launch.call for launch in in_steps)
    names = Counter(name for launch in single_launches for name in launch.kernels)
    num_in_graphs = sum(len(launch.kernels) for launch in graphs)
    return {
        "calls": mean(calls),
        "graphs": round(len(graphs) * scale, 2),
        "kernels": round(len(single_launches) * scale, 2),
        "in_graphs": round(num_in_graphs * scale, 2),
        "names": mean(names),
    }
