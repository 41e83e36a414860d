"""Timeline of one training step: launches by the host, and work on the device.

The host waits for the device before and after each recorded step, so a step begins with an idle
device at the end of one wait and ends with the next.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.launches import GRAPH_LAUNCH, KERNEL_LAUNCHES
from benchmarks.step_profile import Interval, kernels_of, length, read_events, union

#: Kinds of host calls that start work on the device.
LAUNCHES = "launches of kernels"
GRAPHS = "launches of graphs"
_WAIT = "cudaDeviceSynchronize"
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True)
class Timeline:
    """Timeline of one step, with times from its beginning (ms).

    Args:
        duration: Time until the device is idle again (ms).
        host: Intervals of the host's calls by kind, :data:`LAUNCHES` or :data:`GRAPHS`.
        device: Intervals of the work on the device by class of kernel.
        num_launches: Number of calls of each kind (calls).
    """

    duration: float
    host: Mapping[str, Sequence[Interval]]
    device: Mapping[str, Sequence[Interval]]
    num_launches: Mapping[str, int]

    @property
    def idle(self) -> float:
        """Return the time without work on the device (ms)."""
        busy = [interval for intervals in self.device.values() for interval in intervals]
        return self.duration - length(busy)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON files, which :meth:`of_dict` reads."""
        return asdict(self)

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Timeline:
        """Return the timeline from a dictionary of :meth:`as_dict`."""
        host = {kind: list(map(tuple, spans)) for kind, spans in content["host"].items()}
        device = {kind: list(map(tuple, spans)) for kind, spans in content["device"].items()}
        return cls(content["duration"], host, device, content["num_launches"])


def timeline_of(events: Iterable[dict[str, Any]]) -> Timeline:
    """Return the step of median length in a trace.

    Args:
        events: Events of a torch.profiler trace, in which the host waits around each step.

    Raises:
        ValueError: If no kernel runs between two waits.
    """
    events = list(events)
    steps = steps_between_waits(events)
    calls, kernels = _calls_of(events), kernels_of(events)
    middle = statistics.median_high(end - begin for begin, end in steps)
    begin, end = next(step for step in steps if step[1] - step[0] == middle)

    host: dict[str, list[Interval]] = defaultdict(list)
    for call in calls:
        kind = _kind_of(call["name"])
        if kind is not None and begin <= float(call["ts"]) < end:
            host[kind].append(((float(call["ts"]) - begin) / 1e3, (_end(call) - begin) / 1e3))
    device: dict[str, list[Interval]] = defaultdict(list)
    last = begin
    for kernel in kernels:
        if begin <= kernel.start < end:
            last = max(last, kernel.stop)
            span = ((kernel.start - begin) / 1e3, (kernel.stop - begin) / 1e3)
            device[kernel.kind].append(span)
    num_launches = {kind: len(spans) for kind, spans in host.items()}
    busy_host = {kind: union(spans) for kind, spans in host.items()}
    busy_device = {kind: union(spans) for kind, spans in device.items()}
    return Timeline((last - begin) / 1e3, busy_host, busy_device, num_launches)


def steps_between_waits(events: Iterable[dict[str, Any]]) -> list[Interval]:
    """Return the beginning and end of each step (µs).

    Args:
        events: Events of a torch.profiler trace, in which the host waits around each step.

    Raises:
        ValueError: If no kernel runs between two waits.
    """
    events = list(events)
    kernels = kernels_of(events)
    waits = sorted(_end(call) for call in _calls_of(events) if call["name"] == _WAIT)
    steps = []
    for begin, end in pairwise(waits):
        if sum(begin <= kernel.start < end for kernel in kernels) > 1:
            steps.append((begin, end))
    if not steps:
        raise ValueError(
            f"a trace must have kernels between two calls of {_WAIT}: it has {len(waits)} calls "
            f"and {len(kernels)} kernels. Record on a GPU, with the host waiting around each step."
        )
    return steps


def _calls_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of host calls to the CUDA runtime or driver."""
    kinds = ("cuda_runtime", "cuda_driver")
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _kind_of(call: str) -> str | None:
    if call.startswith(GRAPH_LAUNCH):
        return GRAPHS
    return LAUNCHES if call.startswith((*KERNEL_LAUNCHES, *_COPIES)) else None


class StepTimeline(Callback):
    """Callback that records profiler events of a few steps, with host waits around each step.

    Args:
        first: Number of the step before the profiler's warm-up step.
        steps: Number of recorded steps.
    """

    #: The callback reads neither gradients nor parameters.
    reads_gradients = False

    def __init__(self, first: int, steps: int = 3) -> None:
        self.first = first
        #: Number of the last step that the callback needs.
        self.last = first + 1 + steps
        #: Events of the trace, once the training has ended.
        self.events: list[dict[str, Any]] = []
        self._profiler: Any = None
        self._steps = steps

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Start, advance or stop the profiler."""
        step = trainer.global_step
        if not self.first <= step <= self.last:
            return
        wait_for(trainer)
        if step == self.first:
            self._start(trainer)
        else:
            self._profiler.step()
        if step == self.last:
            self._profiler.stop()
        # The trace contains this wait, and the next step begins at its end.
        wait_for(trainer)

    def _start(self, trainer: Trainer) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            # On a GPU, record no host operators, because recording them slows the host down.
            activities=[activity.CUDA if on_gpu else activity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._read,
        )
        self._profiler.start()

    def _read(self, profiler: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            self.events = read_events(path)


def wait_for(trainer: Trainer) -> None:
    """Wait for the device of a training."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
