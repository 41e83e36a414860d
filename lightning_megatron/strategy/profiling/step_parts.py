"""Parts of a step's time on one rank, from the events of a trace: which kernels or operators ran,
and which communication they have hidden.

At each moment of a step only one part counts: the first one of :data:`PARTS` that runs, then
communication, which is exposed there, and then nothing. The parts therefore add up to the step. On
a GPU kernels count. Without one, operators of the host count, without those that call others, and
the collectives of the host's threads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

from lightning_megatron.plan.columns import align_columns

COMMUNICATION = "communication"
#: Part of what no pattern names.
ELEMENTWISE = "elementwise and reductions"
OPTIMIZER = "optimizer"
#: Parts, each with texts in the lower-case names of its kernels and operators. The first match
#: counts, because names of attention kernels can also contain those of matrix products.
_TEXTS = {
    COMMUNICATION: """nccl gloo: c10d:: symm_mem symmetric_memory one_shot two_shot _put_tokens
        _put_sums _add_slots _put_counts _put_weights _add_clone_gradients""",
    "attention": "flash fmha sdpa attention",
    "router": "_route_",
    "permutes": "_spread _collect _count_choices _add_up_counts _place_choices",
    OPTIMIZER: "multi_tensor_apply adam lpnorm fusedoptimizer _update _advance",
    "products": """gemm nvjet cublas cutlass gemv splitk matmul s16816 wgmma ::mm ::addmm ::bmm
        ::baddbmm ::_grouped_mm ::_scaled_mm mkldnn""",
    "copies and fills": "memcpy memset fillfunctor copy_kernel direct_copy catarray",
}
PATTERNS = {part: tuple(texts.split()) for part, texts in _TEXTS.items()}
#: Parts of computation, in the order in which they count.
PARTS = (*(part for part in PATTERNS if part != COMMUNICATION), ELEMENTWISE)
EXPOSED = "communication, exposed"
HIDDEN = "communication, hidden"
NOTHING = "nothing runs"
STEP = "step"
#: Categories of trace events that run on the device.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: Ranges of the host whose operators belong to the optimizer.
UPDATE_RANGES = ("optimizer update", "clip gradients")
#: Beginning of the names of ranges in which the host waits for a collective.
WAIT = "wait for "

#: Names of operators; nodes of autograd, which may wait for other ranks, are none.
_OPERATOR = re.compile(r"(?!autograd::|torch::autograd)\w+::")

Interval = tuple[float, float]


@dataclass(frozen=True)
class WorkSpan:
    """Kernel, or operator of the host.

    Args:
        name: Name in the trace.
        part: Part of the step, of :data:`PARTS` or ``communication``.
        start: Begin (µs).
        stop: End (µs).
    """

    name: str
    part: str
    start: float
    stop: float


def part_of(name: str) -> str:
    """Return the part of a step to which a kernel or an operator belongs, by its name."""
    lower = name.lower()
    found = (part for part, marks in PATTERNS.items() for mark in marks if mark in lower)
    return next(found, ELEMENTWISE)


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


def inside(intervals: Iterable[Interval], window: Sequence[Interval]) -> list[Interval]:
    """Return the pieces of intervals that lie in a window of disjoint intervals."""
    pieces = []
    for start, stop in intervals:
        for first, last in window:
            if start < last and stop > first:
                pieces.append((max(start, first), min(stop, last)))
    return pieces


def work_of(events: Iterable[Mapping[str, Any]]) -> list[WorkSpan]:
    """Return what ran, from the complete events of a trace of torch's profiler (``ph`` is X).

    If any event is on a device, only those count.
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_device = [event for event in whole if event.get("cat") in ON_DEVICE]
    if on_device:
        return [_work(event, part_of(event["name"])) for event in on_device]
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in whole:
        threads[event["tid"]].append(event)
    work = []
    for thread in threads.values():
        work += _work_of_host(sorted(thread, key=lambda event: (event["ts"], -event["dur"])))
    return work


def _work_of_host(events: Sequence[Mapping[str, Any]]) -> list[WorkSpan]:
    """Return the work of a thread: waits, collectives, and operators with a name in the patterns or
    without others inside.
    """
    work = []
    #: Events that are open, the outermost first.
    stack: list[Mapping[str, Any]] = []
    for number, event in enumerate(events):
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        name = event["name"]
        part = part_of(name)
        if name.startswith((WAIT, "gloo:")):
            work.append(_work(event, COMMUNICATION))
        elif event.get("cat") == "cpu_op" and _OPERATOR.match(name):
            following = events[number + 1] if number + 1 < len(events) else None
            is_leaf = following is None or following["ts"] >= event["ts"] + event["dur"]
            if part != COMMUNICATION and any(map(_is_update, stack)):
                part = OPTIMIZER
            if is_leaf or part != ELEMENTWISE:
                work.append(_work(event, part))
        stack.append(event)
    return work


def _is_update(event: Mapping[str, Any]) -> bool:
    return bool(event["name"].startswith(UPDATE_RANGES))


def _work(event: Mapping[str, Any], part: str) -> WorkSpan:
    return WorkSpan(event["name"], part, event["ts"], event["ts"] + event["dur"])


def step_parts(
    work: Sequence[WorkSpan], window: Sequence[Interval], num_steps: int
) -> dict[str, float]:
    """Return the time of each part (ms a step).

    Args:
        work: What ran on one rank.
        window: Disjoint intervals of the steps (µs).
        num_steps: Number of steps in the window.

    Returns:
        The parts of :data:`PARTS`, ``communication, exposed`` and ``nothing runs``, which add up to
        ``step``, and ``communication, hidden``, which ran beside them.
    """
    spans: dict[str, list[Interval]] = defaultdict(list)
    for one in work:
        spans[one.part].append((one.start, one.stop))
    covered: list[Interval] = []
    parts: dict[str, float] = {}
    for part in (*PARTS, COMMUNICATION):
        longer = union([*covered, *inside(spans[part], window)])
        parts[part] = length(longer) - length(covered)
        covered = longer
    total = length(window)
    exposed = parts.pop(COMMUNICATION)
    parts |= {EXPOSED: exposed, NOTHING: total - length(covered), STEP: total}
    parts[HIDDEN] = length(inside(spans[COMMUNICATION], window)) - exposed
    return {part: time / 1e3 / num_steps for part, time in parts.items()}


def longest(
    work: Sequence[WorkSpan], window: Sequence[Interval], num_steps: int, most: int = 12
) -> list[dict[str, Any]]:
    """Return the kernels or operators that take the most time, with number and time (ms a step)."""
    rows: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in work:
        for start, stop in inside([(one.start, one.stop)], window):
            rows[one.name, one.part].append(stop - start)
    ordered = sorted(rows.items(), key=lambda row: -sum(row[1]))
    return [
        {
            "name": name,
            "part": part,
            "count": len(times) / num_steps,
            "ms": sum(times) / 1e3 / num_steps,
        }
        for (name, part), times in ordered[:most]
    ]


@dataclass(frozen=True)
class StageTable:
    """Parts of a step by pipeline stage, each the mean of the stage's ranks.

    Args:
        stages: Time of each part (ms a step), by stage.
        longest: What took the most time on rank 0; see :func:`longest`.
    """

    stages: tuple[Mapping[str, float], ...]
    longest: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(
        cls, ranks: Sequence[tuple[int, Mapping[str, float]]], longest: Sequence[Mapping[str, Any]]
    ) -> StageTable:
        """Return the table of all ranks, each given as its stage and its parts."""
        groups: dict[int, list[Mapping[str, float]]] = defaultdict(list)
        for stage, parts in ranks:
            groups[stage].append(parts)
        means = []
        for _, group in sorted(groups.items()):
            means.append({part: fmean(map(itemgetter(part), group)) for part in group[0]})
        return cls(tuple(means), longest)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells; parts that no stage has are left out."""
        head = ("ms a step (percent)", *(f"stage {n}" for n in range(len(self.stages))))
        rows = [head]
        for part in (*PARTS, EXPOSED, NOTHING, STEP, HIDDEN):
            times = [stage[part] for stage in self.stages]
            if any(times) or part in (EXPOSED, NOTHING):
                name = f"{part} (beside the parts)" if part == HIDDEN else part
                shares = [100 * stage[part] / stage[STEP] for stage in self.stages]
                cells = zip(times, shares, strict=True)
                rows.append((name, *(f"{time:.3f} ({share:.1f})" for time, share in cells)))
        return rows

    def text(self) -> str:
        """Return the table for a terminal, and below it what took the most time on rank 0."""
        lines = [align_columns(self.rows())]
        if self.longest:
            lines += ["", "longest on rank 0, ms a step:"]
            lines += [
                f"{row['ms']:9.3f} {row['count']:6.0f} x  {row['name'][:80]} ({row['part']})"
                for row in self.longest
            ]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        head, *body = ["| " + " | ".join(cells) + " |" for cells in self.rows()]
        return "\n".join([head, "|---" + "|---:" * len(self.stages) + "|", *body])

    def as_dict(self) -> dict[str, Any]:
        """Return the table for a JSON file."""
        return {"stages": [dict(stage) for stage in self.stages], "longest": list(self.longest)}
