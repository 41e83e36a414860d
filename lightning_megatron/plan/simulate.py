"""Simulation of a pipeline schedule with given times of actions and transfers, and the points
at which stages start to reduce gradients without slowing each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action, Kind
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import Count, Index, coerce_fields

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class StageCosts:
    """Times of every virtual stage, in ticks of any length.

    Args:
        weight_half: Time of the weight half, for each virtual stage. A whole backward takes the sum
            of both halves.
        transfer: Time of a transfer between two stages.

    Raises:
        ParallelPlanError: For times below 1 and lists of different lengths.
    """

    forward: tuple[Count, ...]
    input_half: tuple[Count, ...]
    weight_half: tuple[Count, ...]
    transfer: Index = 0

    def __post_init__(self) -> None:
        coerce_fields(self)
        lists = ("forward", "input_half", "weight_half")
        lengths = {name: len(getattr(self, name)) for name in lists}
        if len(set(lengths.values())) > 1 or not self.forward:
            raise ParallelPlanError(
                "costs must have one time for each virtual stage in every list: the lengths of the "
                f"lists are {lengths}. Use lists with pp x vpp times each."
            )

    @property
    def num_virtual_stages(self) -> int:
        """Return the number of virtual stages that have times."""
        return len(self.forward)

    def merged(self, num_virtual_stages: int) -> StageCosts:
        """Return the times of fewer virtual stages, each of which has several consecutive ones.

        Raises:
            ParallelPlanError: If the virtual stages cannot be merged evenly.
        """
        return StageCosts(
            merged(self.forward, num_virtual_stages),
            merged(self.input_half, num_virtual_stages),
            merged(self.weight_half, num_virtual_stages),
            self.transfer,
        )

    def ticks(self, kind: Kind, virtual_stage: int) -> int:
        """Return the time of an action in a virtual stage."""
        if kind == "F":
            return self.forward[virtual_stage]
        halves = {"I": self.input_half[virtual_stage], "W": self.weight_half[virtual_stage]}
        return halves[kind] if kind in halves else sum(halves.values())


def merged(values: Sequence[T], count: int) -> tuple[T, ...]:
    """Return the sums of values of consecutive virtual stages, for a smaller number of them.

    Raises:
        ParallelPlanError: If the virtual stages cannot be merged evenly.
    """
    size, rest = divmod(len(values), count)
    if rest:
        raise ParallelPlanError(
            "costs must have one time for each virtual stage, or for equal parts of each: they "
            f"have {len(values)}, and the schedule has {count} virtual stages. Use {count} times "
            f"in each list, or a multiple of {count}."
        )
    return tuple(sum(values[first : first + size]) for first in range(0, len(values), size))


class Span(NamedTuple):
    """Time span in which a stage works on an action."""

    stage: int
    action: Action
    start: int
    stop: int


@dataclass(frozen=True)
class Timeline:
    """Time spans of all actions of a schedule."""

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> int:
        """Return the number of ticks until the last stage is done."""
        return max((row[-1].stop for row in self.rows if row), default=0)

    @property
    def bubble(self) -> float:
        """Return the share of the stages' total time in which they are idle."""
        return sum(self.idle()) / (self.length * len(self.rows)) if self.length else 0.0

    def idle(self) -> tuple[int, ...]:
        """Return the ticks of the step in which each stage does not compute."""
        return tuple(self.length - _busy(row) for row in self.rows)

    def waits(self) -> tuple[int, ...]:
        """Return the ticks that each stage is idle between its first action and its last."""
        return tuple(row[-1].stop - row[0].start - _busy(row) if row else 0 for row in self.rows)


def _busy(row: Sequence[Span]) -> int:
    return sum(span.stop - span.start for span in row)


def consumer_of(schedule: Schedule, stage: int, action: Action) -> tuple[int, Action] | None:
    """Return the stage and the action that consume the result of an action, or None if none does.

    A forward feeds the forward of the next virtual stage. A backward or input gradient feeds the
    backward of the previous virtual stage.
    """
    if action.kind == "W":
        return None
    placement = schedule.placement
    step = 1 if action.kind == "F" else -1
    virtual = placement.virtual_stage(stage, action.chunk) + step
    if not 0 <= virtual < placement.num_virtual_stages:
        return None
    consumer, chunk = placement.owner(virtual)
    kind: Kind = "F"
    if action.kind != "F":
        kind = "I" if schedule.is_split(consumer, chunk, action.microbatch) else "B"
    return consumer, Action(kind, chunk, action.microbatch)


def simulate(schedule: Schedule, costs: StageCosts | None = None) -> Timeline:
    """Simulate a schedule: a stage runs its actions in order, each once its input is available.

    A pair begins once both inputs are available; its two actions run one after the other.

    Args:
        costs: Times of every virtual stage; None means one tick for a forward and each half of a
            backward, and none for transfers.

    Raises:
        ParallelPlanError: If stages wait for each other in a cycle, or costs are for another number
            of virtual stages.
    """
    placement = schedule.placement
    costs = _costs_of(schedule, costs)
    # Tick at which the input of a stage's action from another virtual stage is available, and the
    # stage that the input comes from.
    ready: dict[tuple[int, Action], int] = {}
    producers: dict[tuple[int, Action], int] = {}
    targets = []
    for stage, row in enumerate(schedule.rows):
        targets.append([consumer_of(schedule, stage, action) for action in row])
        producers |= dict.fromkeys(filter(None, targets[-1]), stage)
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    # Action whose input a stage waits for.
    heads: dict[int, Action] = {}
    # A stage runs all actions whose inputs are available, and is visited again with each new input.
    pending = deque(range(len(schedule.rows)))
    while pending:
        stage = pending.popleft()
        row = schedule.rows[stage]
        while len(spans[stage]) < len(row):
            action = row[len(spans[stage])]
            begun = (schedule.pair_at(stage, len(spans[stage])) or action).actions
            inputs = [(stage, one) for one in begun if (stage, one) in producers]
            missing = [one for _, one in inputs if (stage, one) not in ready]
            if missing:
                heads[stage] = missing[0]
                break
            heads.pop(stage, None)
            free = spans[stage][-1].stop if spans[stage] else 0
            start = max([free, *(ready[one] for one in inputs)])
            virtual = placement.virtual_stage(stage, action.chunk)
            span = Span(stage, action, start, start + costs.ticks(action.kind, virtual))
            spans[stage].append(span)
            target = targets[stage][len(spans[stage]) - 1]
            if target is None:
                continue
            ready[target] = span.stop + (costs.transfer if target[0] != stage else 0)
            if target[0] != stage:
                pending.append(target[0])
    if heads:
        raise _deadlock(schedule, heads, producers)
    return Timeline(schedule, tuple(tuple(row) for row in spans))


def _costs_of(schedule: Schedule, costs: StageCosts | None) -> StageCosts:
    """Return the costs of a schedule: of a tick each if there are none."""
    count = schedule.placement.num_virtual_stages
    if costs is None:
        ticks = (1,) * count
        return StageCosts(ticks, ticks, ticks)
    if costs.num_virtual_stages != count:
        raise ParallelPlanError(
            "costs must have one time for each virtual stage: they have "
            f"{costs.num_virtual_stages}, schedule {schedule.name!r} has pp x vpp of "
            f"{schedule.num_stages} x {schedule.num_chunks}. Use {count} times."
        )
    return costs


def _deadlock(
    schedule: Schedule, heads: Mapping[int, Action], producers: Mapping[tuple[int, Action], int]
) -> ParallelPlanError:
    """Name the stages of a cycle, from the actions that the stages cannot start."""
    path: list[int] = []
    stage = min(heads)
    while stage not in path:
        path.append(stage)
        stage = producers[stage, heads[stage]]
    waits = [
        f"stage {stage} waits for the input of {heads[stage]} from stage "
        f"{producers[stage, heads[stage]]}"
        for stage in path[path.index(stage) :]
    ]
    text = ", ".join(waits)
    return ParallelPlanError(
        f"schedule {schedule.name!r} is not legal: its stages wait for each other. "
        f"{text[0].upper()}{text[1:]}. Order the actions so that a stage computes what other "
        "stages wait for before it waits for them."
    )


@dataclass(frozen=True)
class ReductionPoint:
    """Action after which a stage starts to reduce a chunk's gradients over the data ranks.

    Args:
        after_action: Index of the action among the stage's actions.
        chunk: Chunk whose gradients are complete and are reduced.
        early: Whether the action is the stage's own last backward of the chunk. Gradients may then
            be sent as they become ready, while that backward is still running.
    """

    after_action: int
    chunk: int
    early: bool


def reduction_points(schedule: Schedule) -> tuple[tuple[ReductionPoint, ...], ...]:
    """Choose when every stage starts to reduce each chunk's gradients.

    Stages finish a chunk at different times. If a stage reduced at once, it would compete for links
    and compute with backwards of other stages on the critical path. Therefore all stages wait, in
    unit times of :func:`simulate`, until the last stage has finished its last backward of the
    chunk. Each stage starts after its first action that ends then or later, or after its last
    action. The order of the chunks is the same on all stages.

    Returns:
        For each stage one point per chunk, in the order of their start; ``after_action`` never
        decreases.

    Raises:
        ParallelPlanError: For a schedule without backwards, which has no gradients.
    """
    if schedule.forward_only:
        raise ParallelPlanError(
            "a schedule must have backward passes, because they compute the gradients that are "
            f"summed: schedule {schedule.name!r} is forward only. Build it with forward_only=False."
        )
    rows = simulate(schedule).rows
    last_backward: list[dict[int, int]] = []
    done = dict.fromkeys(range(schedule.num_chunks), 0)
    for row in rows:
        last_backward.append({})
        for index, span in enumerate(row):
            if span.action.kind in ("B", "W"):
                last_backward[-1][span.action.chunk] = index
                done[span.action.chunk] = max(done[span.action.chunk], span.stop)
    # Backward reaches the first chunk last, so of two chunks with equal times the higher one comes
    # first.
    order = sorted(done, key=lambda chunk: (done[chunk], -chunk))
    points = []
    for row, last in zip(rows, last_backward, strict=True):
        stage_points: list[ReductionPoint] = []
        for chunk in order:
            ending = (index for index, span in enumerate(row) if span.stop >= done[chunk])
            after = next(ending, len(row) - 1)
            stage_points.append(ReductionPoint(after, chunk, early=after == last[chunk]))
        points.append(tuple(stage_points))
    return tuple(points)
