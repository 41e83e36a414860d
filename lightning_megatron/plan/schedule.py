"""Pipeline schedules as data: the order of microbatches and chunks on every stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action, Kind, PassPair, RowBuilder
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.settings import join_or, require_positive
from lightning_megatron.plan.zero_bubble import (
    dual_pipe_v_row,
    zero_bubble_row,
    zero_bubble_v_row,
)


def whole_backward_row(
    warmup: int, num_microbatches: int, num_chunks: int, group: int
) -> tuple[Action, ...]:
    """Order the actions of a stage: some forwards, then forward and backward in turn.

    Args:
        warmup: Forwards before the first pair of a forward and a backward.
        group: Number of microbatches that pass through a chunk before the next chunk starts.
    """
    forwards = _forwards(num_microbatches, num_chunks, group)
    backwards = [Action("B", num_chunks - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    row = [Action("F", *unit) for unit in forwards[:warmup]]
    for unit, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [Action("F", *unit), backward]
    return tuple(row + backwards[max(len(forwards) - warmup, 0) :])


def forward_row(num_microbatches: int, num_chunks: int, group: int) -> tuple[Action, ...]:
    """Order the forwards of a stage in groups, each of which passes all chunks before the next."""
    return tuple(Action("F", *unit) for unit in _forwards(num_microbatches, num_chunks, group))


def forward_v_row(rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Order the forwards of a stage with two chunks in a V.

    Chunk 1 takes every second turn from the one in which the first microbatch comes back.
    """
    row = RowBuilder()
    warmup = min(2 * (num_stages - 1 - rank) + 1, num_microbatches)
    for _ in range(warmup):
        row.forward(0)
    for number in range(num_microbatches):
        row.forward(1)
        if warmup + number < num_microbatches:
            row.forward(0)
    return row.row


def _forwards(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    # Pairs (chunk, microbatch): a group of microbatches passes all chunks before the next group
    # starts.
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


ScheduleName = Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zb-v", "dualpipe-v"]
"""Named schedules, described in :func:`build_schedule`."""

ScheduleOption = ScheduleName | Literal["auto"]
"""Named schedules, and the fastest of them by times that the first steps measure."""

SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def _one_forward_one_backward(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int, group: int
) -> tuple[Action, ...]:
    warmup = min(num_stages - stage - 1, num_microbatches)
    return whole_backward_row(warmup, num_microbatches, num_chunks, group)


def _interleaved(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int, group: int
) -> tuple[Action, ...]:
    warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * group
    warmup = min(warmup, num_microbatches * num_chunks)
    return whole_backward_row(warmup, num_microbatches, num_chunks, group)


@dataclass(frozen=True)
class NamedSchedule:
    """Properties of a named schedule.

    Args:
        row: Function that returns the actions of a stage, given the stage, the numbers of stages,
            of microbatches and of chunks, and the microbatches that run through a chunk before the
            next chunk runs.
        chunks: Chunks per stage; None means any number above 1.
        shape: Placement of the chunks on the stages.
        splits: Whether some backward passes run in halves.
        keeps_all: Whether a stage keeps all microbatches of a step.
    """

    row: Callable[[int, int, int, int, int], tuple[Action, ...]]
    chunks: int | None = 1
    shape: PlacementShape = "loop"
    splits: bool = False
    keeps_all: bool = False


#: What differs between the named schedules, in the order of :data:`ScheduleName`.
NAMED_SCHEDULES: Mapping[str, NamedSchedule] = {
    "1f1b": NamedSchedule(_one_forward_one_backward),
    "interleaved": NamedSchedule(_interleaved, chunks=None),
    "gpipe": NamedSchedule(
        lambda stage, stages, microbatches, *_: whole_backward_row(
            microbatches, microbatches, 1, microbatches
        ),
        keeps_all=True,
    ),
    "zb-h1": NamedSchedule(
        lambda stage, stages, microbatches, *_: zero_bubble_row(stage, stages, microbatches),
        splits=True,
    ),
    "zb-v": NamedSchedule(
        lambda stage, stages, microbatches, *_: zero_bubble_v_row(stage, stages, microbatches),
        chunks=2,
        shape="v",
        splits=True,
    ),
    "dualpipe-v": NamedSchedule(
        lambda stage, stages, microbatches, *_: dual_pipe_v_row(stage, stages, microbatches),
        chunks=2,
        shape="v",
        splits=True,
    ),
}


@dataclass(frozen=True)
class Schedule:
    """Ordered actions of every stage.

    Args:
        num_chunks: Chunks per stage (vpp).
        rows: Actions of every stage in order, as ``rows[stage]``.
        forward_only: Whether there is no backward (validation, test, predict).
        shape: Placement of the chunks on the stages.
        is_paired: Whether a forward and the whole backward of another microbatch behind it are a
            pair, which a stage begins once it has the inputs of both.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    rows: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
    shape: PlacementShape = "loop"
    is_paired: bool = False

    @cached_property
    def placement(self) -> Placement:
        """Return the stage and chunk of every virtual stage."""
        return Placement(self.shape, self.num_stages, self.num_chunks)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a stage in order."""
        return self.rows[rank]

    def pair_at(self, rank: int, index: int) -> PassPair | None:
        """Return the pair that begins with the action at an index of a stage's row, if any."""
        actions = self.rows[rank][index : index + 2]
        if not self.is_paired or [action.kind for action in actions] != ["F", "B"]:
            return None
        return None if actions[0].unit == actions[1].unit else PassPair(*actions)

    def is_split(self, rank: int, chunk: int, microbatch: int) -> bool:
        """Return whether a stage runs a backward in two halves."""
        return (chunk, microbatch) in self._split[rank]

    @cached_property
    def _split(self) -> tuple[frozenset[tuple[int, int]], ...]:
        split = []
        for row in self.rows:
            halves = [action for action in row if action.kind == "I"]
            split.append(frozenset((action.chunk, action.microbatch) for action in halves))
        return tuple(split)

    def validate(self) -> Schedule:
        """Return the schedule after a check that every stage does all its work once and in order.

        Raises:
            ParallelPlanError: If an action is missing, repeated, unknown or too early; the message
                names stage and action.
        """
        if len(self.rows) != self.num_stages:
            raise ParallelPlanError(
                f"a schedule must have one row for each stage: it has {len(self.rows)} rows, pp is "
                f"{self.num_stages}."
            )
        for rank, row in enumerate(self.rows):
            self._validate_row(rank, row)
        return self

    def _validate_row(self, rank: int, row: tuple[Action, ...]) -> None:
        done: set[Action] = set()
        for action in row:
            chunk = action.chunk
            microbatch = action.microbatch
            if action.kind not in get_args(Kind):
                raise self._fault(
                    rank, action, f"is of no kind that exists. Use {join_or(get_args(Kind))}"
                )
            if action in done:
                raise self._fault(rank, action, f"happens twice. {self._legal_row}")
            if not (0 <= chunk < self.num_chunks and 0 <= microbatch < self.num_microbatches):
                raise self._fault(
                    rank,
                    action,
                    "names a chunk or microbatch that does not exist. Use chunks of 0 to "
                    f"{self.num_chunks - 1} and microbatches of 0 to {self.num_microbatches - 1}",
                )
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if before and Action(before, chunk, microbatch) not in done:  # type: ignore[arg-type]
                raise self._fault(rank, action, f"happens before its {before}. {self._legal_row}")
            done.add(action)
        for chunk in range(self.num_chunks):
            for microbatch in range(self.num_microbatches):
                kinds = [kind for kind in get_args(Kind) if Action(kind, chunk, microbatch) in done]
                if kinds not in ([["F"]] if self.forward_only else [["F", "B"], ["F", "I", "W"]]):
                    rule = "come alone" if self.forward_only else "come with B, or with I and W"
                    what = f"must {rule}: found {', '.join(kinds) or 'nothing'}"
                    raise self._fault(
                        rank, Action("F", chunk, microbatch), f"{what}. {self._legal_row}"
                    )

    @property
    def _legal_row(self) -> str:
        if self.forward_only:
            return "A stage without backwards runs each microbatch of each chunk once: F"
        return (
            "A stage runs each microbatch of each chunk once: F, then B, or I and later W in place "
            "of B"
        )

    def _fault(self, rank: int, action: Action, what: str) -> ParallelPlanError:
        return ParallelPlanError(
            f"schedule {self.name!r} is not legal: on stage {rank}, {action} {what}."
        )


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    microbatch_group_size: int | None = None,
    forward_only: bool = False,
    is_paired: bool = False,
) -> Schedule:
    """Build the order of actions of every pipeline stage.

    Bubble and memory are given for many microbatches and p stages, with times F, I and W of a
    forward and of the two halves of a backward. Memory counts microbatches of a whole stage, each
    from its forward to its last half, on the stage that keeps most.

    - "gpipe": all forwards, then all backwards. It keeps all microbatches.
    - "1f1b": one forward, one backward, in Megatron-Core's order. Bubble (p - 1) (F + I + W),
      memory p.
    - "interleaved": the same over several chunks per stage, in Megatron-Core's order. The bubble is
      divided by the number of chunks v, memory is p (1 + (p - 1) / (p v)).
    - "zb-h1": 1f1b with backwards in halves. Bubble (p - 1) (F + I - W), memory p on all stages.
    - "zb-v": halves, and two chunks per stage in a V. No bubble where F, I and W are equal, memory
      p on all stages.
    - "dualpipe-v": two chunks per stage in a V; most backwards are whole, paired with a forward of
      the other chunk. With FB for both together, the bubble is at most (p - 1) (FB + I - 2 W) in
      times of a chunk; memory p + 1/2.

    Args:
        name: Name of the schedule, from the list above.
        num_chunks: Chunks per stage (vpp): at least 2 for "interleaved", 2 for "zb-v" and
            "dualpipe-v", 1 for the others.
        microbatch_group_size: Number of microbatches that pass through a chunk before the next
            chunk starts, for "interleaved" only; None means num_stages.
        forward_only: Whether to omit the backwards.
        is_paired: Whether stages switch between paired passes, see :func:`paired_rows`.

    Raises:
        ParallelPlanError: For an unknown name, and for sizes that the schedule cannot run.

    Source: GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503),
        interleaved (https://arxiv.org/abs/2104.04473), zero bubble
        (https://arxiv.org/abs/2401.10241), DualPipe (https://arxiv.org/abs/2412.19437).
    """
    check_schedule_sizes(
        name, num_stages, num_microbatches, num_chunks, microbatch_group_size, forward_only
    )
    named = NAMED_SCHEDULES[name]
    if forward_only:
        placement = Placement(named.shape, num_stages, num_chunks)
        return forward_schedule(name, placement, num_microbatches, microbatch_group_size)
    group = (microbatch_group_size or num_stages) if name == "interleaved" else num_microbatches
    rows = tuple(
        named.row(rank, num_stages, num_microbatches, num_chunks, group)
        for rank in range(num_stages)
    )
    if is_paired:
        rows = paired_rows(name, rows, num_microbatches)
    return Schedule(
        name, num_stages, num_microbatches, num_chunks, rows, shape=named.shape, is_paired=is_paired
    ).validate()


def paired_rows(
    name: str, rows: tuple[tuple[Action, ...], ...], num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the rows of a schedule in which stages switch between two microbatches.

    "dualpipe-v" has pairs already. "1f1b" of a single stage begins the next forward before each
    backward, with which it is paired: memory 2.
    """
    check_pairs(name, len(rows), num_microbatches)
    alone = whole_backward_row(1, num_microbatches, 1, num_microbatches)
    return (alone,) if name == "1f1b" else rows


def check_pairs(order: object, num_stages: int, num_microbatches: int | None = None) -> None:
    """Check that stages can switch between forwards and backwards of an order of passes.

    Args:
        num_microbatches: Microbatches of a step; None if they are not known.

    Raises:
        ParallelPlanError: For orders without pairs, and for a single microbatch.
    """
    if order != "dualpipe-v" and (order != "1f1b" or num_stages > 1):
        raise ParallelPlanError(
            "experts.overlap needs a schedule that pairs the forward pass of a microbatch with the "
            f"backward pass of another: schedule is {order!r} with pp {num_stages}. Use schedule "
            "'1f1b' with pp=1, 'dualpipe-v' with vpp=2, or experts.overlap=False."
        )
    if num_microbatches == 1:
        raise ParallelPlanError(
            "experts.overlap needs at least two microbatches in a step: num_microbatches is 1, and "
            "the tokens of one travel while the other computes. Use a smaller microbatch_size, or "
            "experts.overlap=False."
        )


def forward_schedule(
    name: str, placement: Placement, num_microbatches: int, group_size: int | None = None
) -> Schedule:
    """Build the order of forwards without backwards, as for validation.

    Args:
        group_size: Number of microbatches that pass through a chunk before the next chunk starts,
            unless two chunks lie in a V; None means the number of stages.
    """
    num_stages = placement.num_stages
    num_chunks = placement.num_chunks
    if placement.shape == "v" and num_chunks == 2:
        rows = tuple(
            forward_v_row(rank, num_stages, num_microbatches) for rank in range(num_stages)
        )
    else:
        rows = (forward_row(num_microbatches, num_chunks, group_size or num_stages),) * num_stages
    return Schedule(
        name, num_stages, num_microbatches, num_chunks, rows, True, placement.shape
    ).validate()


def check_schedule_sizes(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    microbatch_group_size: int | None = None,
    forward_only: bool = False,
) -> None:
    """Check that :func:`build_schedule` can build a schedule from the same arguments.

    Raises:
        ParallelPlanError: For an unknown name, and for sizes that the schedule cannot run.
    """
    sizes = {"pp": num_stages, "num_microbatches": num_microbatches, "vpp": num_chunks}
    for size_name, size in sizes.items():
        require_positive(size_name, size)
    if name not in SCHEDULE_NAMES:
        raise ParallelPlanError(f"schedule must be {join_or(SCHEDULE_NAMES)}: it is {name!r}.")
    check_chunks(name, num_stages, num_chunks, microbatch_group_size)
    # Without backwards a chunk waits only for the chunk before it, so that all numbers work.
    if forward_only:
        return
    if name == "dualpipe-v" and num_microbatches < 2 * num_stages:
        raise ParallelPlanError(
            "schedule 'dualpipe-v' needs at least two microbatches per stage: num_microbatches is "
            f"{num_microbatches}, pp is {num_stages}. With fewer, the two directions of the V "
            f"would not overlap. Use {2 * num_stages} microbatches or more, or schedule 'zb-v'."
        )
    if name == "interleaved":
        group = num_stages if microbatch_group_size is None else microbatch_group_size
        _check_group(num_stages, num_microbatches, group)


def check_chunks(name: str, num_stages: int, num_chunks: int, group: int | None) -> None:
    """Check that a named schedule can run chunks per stage; only interleaved has a group size.

    Raises:
        ParallelPlanError: For numbers that the schedule cannot run.
    """
    named = NAMED_SCHEDULES[name]
    if named.shape == "v" and num_chunks != 2:
        raise ParallelPlanError(
            f"schedule {name!r} runs two chunks per stage: vpp is {num_chunks}. The first chunks "
            "go from the first stage to the last in a V, and the second chunks go back. Use vpp of "
            "2."
        )
    if named.chunks == 1 and num_chunks > 1:
        raise ParallelPlanError(
            f"schedule {name!r} runs one chunk per stage: vpp is {num_chunks}. It cannot order "
            "several chunks of a stage. Use schedule 'interleaved', 'zb-v' or 'dualpipe-v', or vpp "
            "of 1."
        )
    if name != "interleaved" and group is not None:
        raise ParallelPlanError(
            f"microbatch_group_size ({group}) belongs to schedule 'interleaved': schedule is "
            f"{name!r}, which has no groups of microbatches. Use microbatch_group_size of None."
        )
    if name == "interleaved" and num_chunks == 1:
        raise ParallelPlanError(
            "schedule 'interleaved' needs vpp above 1: vpp is 1, and one chunk per stage cannot be "
            "interleaved. Use vpp of 2 or more, or schedule '1f1b'."
        )
    if name == "interleaved" and num_stages == 1:
        raise ParallelPlanError(
            f"schedule 'interleaved' needs pp above 1: pp is 1 with vpp {num_chunks}, and one "
            "stage has no bubble to shorten. Use pp of 2 or more, or schedule '1f1b' with vpp of 1."
        )


def _check_group(num_stages: int, num_microbatches: int, group: int) -> None:
    """Refuse groups of interleaved that would wait for themselves or for each other."""
    require_positive("microbatch_group_size", group)
    if num_microbatches < num_stages:
        raise ParallelPlanError(
            "schedule 'interleaved' needs at least as many microbatches as stages: "
            f"num_microbatches is {num_microbatches}, pp is {num_stages}. A chunk would run its "
            f"next microbatches before their inputs exist. Use {num_stages} microbatches or more, "
            "or schedule '1f1b' with vpp of 1."
        )
    sizes = range(num_stages, num_microbatches + 1)
    legal = [size for size in sizes if not 0 < num_microbatches % size < num_stages]
    if group in legal:
        return
    if len(legal) > 6:
        legal = [*legal[:5], legal[-1]]
    multiple = -(-num_microbatches // num_stages) * num_stages
    raise ParallelPlanError(
        f"microbatch groups must have at least pp ({num_stages}) microbatches, also the last one, "
        f"and at most all ({num_microbatches}): microbatch_group_size is {group}; stages of a "
        "smaller group would wait for its own output. Use microbatch_group_size of "
        f"{join_or(legal)}, or {multiple} microbatches."
    )
