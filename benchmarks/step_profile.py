"""Analysis of a profiler trace: the time of a training step by class of kernel.

Kernels are classified by their names. Communication that runs at the same time as another kernel is
hidden; all other communication is exposed. A communication kernel also runs while it waits for
other ranks, so exposed time includes load imbalance. Idle time is time without any kernel on the
device. A step lasts from one optimizer step to the next on the device, independent of the host.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMUNICATION = "communication"

# The first match counts: names of attention kernels can also contain those of matrix products.
_CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        COMMUNICATION,
        (
            "nccl",
            "symm_mem",
            "symmetric_memory",
            "one_shot",
            "two_shot",
            "_put_tokens",
            "_put_sums",
            "_add_slots",
            "_put_counts",
            "_put_weights",
            "_add_clone_gradients",
        ),
    ),
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("router", ("_route_",)),
    (
        "permutes",
        ("_spread", "_collect", "_count_choices", "_add_up_counts", "_place_choices"),
    ),
    (
        "optimizer",
        ("multi_tensor_apply", "adam", "lpnorm", "fusedoptimizer", "_update", "_advance"),
    ),
    (
        "matmul",
        ("gemm", "nvjet", "cublas", "cutlass", "gemv", "splitk", "matmul", "s16816", "wgmma"),
    ),
    (
        "copy and fill",
        ("memcpy", "memset", "fillfunctor", "copy_kernel", "direct_copy", "catarray"),
    ),
)
ELEMENTWISE = "elementwise and reductions"

#: Categories of trace events that run on the device.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Kernel:
    """Kernel, copy or fill on the device."""

    name: str
    start: float
    stop: float
    stream: int

    @property
    def kind(self) -> str:
        """Class of the kernel."""
        lower_name = self.name.lower()
        kinds = (kind for kind, marks in _CLASSES for mark in marks if mark in lower_name)
        return next(kinds, ELEMENTWISE)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sort intervals, and merge overlapping and adjacent ones."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the total time that intervals cover."""
    return sum(stop - start for start, stop in union(intervals))


def outside(intervals: Iterable[Interval], excluded: Iterable[Interval]) -> float:
    """Return the time that ``intervals`` cover and ``excluded`` do not."""
    combined = [*intervals, *(excluded := list(excluded))]
    return length(combined) - length(excluded)


def read_trace(path: str | Path) -> list[Kernel]:
    """Return the kernels of a torch.profiler trace (``.json`` or ``.gz``), sorted by start time."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    kernels = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            start = float(event["ts"])
            stream = int(event.get("args", {}).get("stream", 0))
            kernels.append(Kernel(event["name"], start, start + float(event["dur"]), stream))
    return sorted(kernels, key=lambda kernel: kernel.start)


def find_steps(kernels: Sequence[Kernel]) -> list[Interval]:
    """Return the intervals between starts of optimizer steps.

    An optimizer step starts with the first optimizer kernel after a matrix product.
    """
    starts: list[float] = []
    has_multiplied = False
    for kernel in kernels:
        if kernel.kind == "matmul":
            has_multiplied = True
        elif kernel.kind == "optimizer" and has_multiplied:
            starts.append(kernel.start)
            has_multiplied = False
    return list(zip(starts, starts[1:], strict=False))


def whole_window(kernels: Sequence[Kernel]) -> list[Interval]:
    """Return the interval from the start of the first kernel to the end of the last one, if any.

    The interval is one step if the host waited for the device before and after the step.
    """
    if not kernels:
        return []
    # The end is exclusive, and a kernel may have a duration of 0.
    stop = max(kernel.stop for kernel in kernels)
    return [(min(kernel.start for kernel in kernels), stop + 1e-3)]


def analyse(kernels: Sequence[Kernel], steps: Sequence[Interval]) -> dict[str, Any]:
    """Return the parts of a step's time (ms), as the mean over ``steps``."""
    analysis: dict[str, Any] = {"step_ms": 0.0, "idle_ms": 0.0, "kernels": 0.0}
    kinds: dict[str, float] = defaultdict(float)
    collectives: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    names: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    covered = exposed = 0.0
    scale = 1.0 / (1e3 * max(len(steps), 1))
    for begin, end in steps:
        step_kernels = [k for k in kernels if begin <= k.start < end]
        spans = [(k.start, k.stop) for k in step_kernels]
        analysis["step_ms"] += (end - begin) * scale
        analysis["idle_ms"] += (end - begin - length(spans)) * scale
        analysis["kernels"] += len(step_kernels) / len(steps)
        compute = union((k.start, k.stop) for k in step_kernels if k.kind != COMMUNICATION)
        communication = [k for k in step_kernels if k.kind == COMMUNICATION]
        covered += length((k.start, k.stop) for k in communication) * scale
        exposed += outside([(k.start, k.stop) for k in communication], compute) * scale
        for kernel in step_kernels:
            kinds[kernel.kind] += (kernel.stop - kernel.start) * scale
            names[kernel.name]["ms"] += (kernel.stop - kernel.start) * scale
            names[kernel.name]["count"] += 1 / len(steps)
        for kernel in communication:
            row = collectives[_short(kernel.name)]
            row["count"] += 1 / len(steps)
            row["ms"] += (kernel.stop - kernel.start) * scale
            row["exposed_ms"] += outside([(kernel.start, kernel.stop)], compute) * scale
    analysis["kinds_ms"] = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    analysis["communication_ms"] = covered
    analysis["exposed_ms"] = exposed
    analysis["hidden_percent"] = 100.0 * (1.0 - exposed / covered) if covered else 100.0
    analysis["collectives"] = {name: dict(row) for name, row in collectives.items()}
    analysis["longest"] = [
        {"name": name, **row}
        for name, row in sorted(names.items(), key=lambda item: -item[1]["ms"])[:40]
    ]
    return analysis


def report(analysis: dict[str, Any], width: int = 96) -> str:
    """Format the result of :func:`analyse` as text."""
    lines = [
        (
            f"step under the profiler {analysis['step_ms']:8.2f} ms, "
            f"{analysis['kernels']:.0f} kernels; device time of:"
        )
    ]
    lines += [f"  {kind:<28}{ms:8.2f} ms" for kind, ms in analysis["kinds_ms"].items()]
    lines.append(f"  {'nothing runs (host, gaps)':<28}{analysis['idle_ms']:8.2f} ms")
    lines.append(
        f"communication {analysis['communication_ms']:.2f} ms, "
        f"exposed {analysis['exposed_ms']:.2f} ms: {analysis['hidden_percent']:.1f}% hidden"
    )
    for name, row in sorted(analysis["collectives"].items()):
        lines.append(
            f"  {name:<40}{row['count']:6.0f} x {row['ms']:8.2f} ms, exposed "
            f"{row['exposed_ms']:8.2f} ms"
        )
    lines.append("longest kernels:")
    for row in analysis["longest"]:
        lines.append(f"  {row['ms']:8.2f} ms {row['count']:6.0f} x  {row['name'][:width]}")
    return "\n".join(lines)


def _short(name: str) -> str:
    """Return the name of a kernel without its template and call arguments."""
    return name.split("(")[0].split("<")[0][:40]
