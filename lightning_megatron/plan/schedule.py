"""Pipeline schedules as data: the order of microbatches and chunks on every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.legal_values import join_or, require_index, require_positive

Kind = Literal["F", "B", "I", "W"]
"""F forward, B backward, or the halves of B: I input gradient, W weight gradient."""

ScheduleName = Literal["1f1b", "interleaved", "gpipe"]
SCHEDULE_NAMES = get_args(ScheduleName)


@dataclass(frozen=True, order=True)
class Action:
    """Computation of one microbatch in one chunk of a stage.

    Args:
        kind: Kind of the computation: F, B, I or W.
        chunk: Index of the chunk on this stage.
        microbatch: Index of the microbatch in the step.
    """

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """Ordered actions of every stage.

    Args:
        name: Name of the schedule.
        num_stages: Pipeline-parallel size.
        num_microbatches: Microbatches per step.
        num_chunks: Chunks per stage (vpp).
        rows: Actions of every stage in order, as ``rows[stage]``.
        forward_only: Whether there is no backward (validation, test, predict).
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    rows: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a stage in order."""
        require_index("rank", rank, "pp", self.num_stages)
        return self.rows[rank]

    def order(self, rank: int) -> list[int]:
        """Return the signed chunk of every action: +c for a forward, -c for a backward, c from 1.

        The result equals that of Megatron-Core's ``convert_schedule_table_to_order``.
        Weight-gradient halves are omitted.
        """
        signs = {"F": 1, "B": -1, "I": -1}
        return [
            signs[action.kind] * (action.chunk + 1)
            for action in self.actions(rank)
            if action.kind in signs
        ]

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return the position of a stage's chunk in the order in which a microbatch passes them."""
        return chunk * self.num_stages + rank

    def validate(self) -> Schedule:
        """Return the schedule after a check that every stage does all its work once and in order.

        Raises:
            ParallelPlanError: If an action is missing, repeated, unknown or too early; the message
                names stage and action.
        """
        if len(self.rows) != self.num_stages:
            raise ParallelPlanError(
                f"a schedule has one row per stage: {len(self.rows)} rows, pp {self.num_stages}."
            )
        for rank, row in enumerate(self.rows):
            self._validate_row(rank, row)
        return self

    def _validate_row(self, rank: int, row: tuple[Action, ...]) -> None:
        done: set[Action] = set()
        for action in row:
            chunk = action.chunk
            microbatch = action.microbatch
            if action in done:
                raise self._fault(rank, action, "happens twice")
            if not (0 <= chunk < self.num_chunks and 0 <= microbatch < self.num_microbatches):
                raise self._fault(rank, action, "names a chunk or microbatch that there is none of")
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if before and Action(before, chunk, microbatch) not in done:  # type: ignore[arg-type]
                raise self._fault(rank, action, f"happens before its {before}")
            done.add(action)
        for chunk in range(self.num_chunks):
            for microbatch in range(self.num_microbatches):
                kinds = {
                    kind for kind in ("F", "B", "I", "W") if Action(kind, chunk, microbatch) in done
                }
                if kinds not in ([{"F"}] if self.forward_only else [{"F", "B"}, {"F", "I", "W"}]):
                    what = f"must go with its backward alone: found are {sorted(kinds)}"
                    raise self._fault(rank, Action("F", chunk, microbatch), what)

    def _fault(self, rank: int, action: Action, what: str) -> ParallelPlanError:
        return ParallelPlanError(
            f"schedule {self.name!r} is not legal: on stage {rank}, {action.kind} of microbatch "
            f"{action.microbatch} in chunk {action.chunk} {what}. Use one of the built-in "
            f"schedules: {join_or(SCHEDULE_NAMES)}."
        )


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    microbatch_group_size: int | None = None,
    forward_only: bool = False,
) -> Schedule:
    """Build the order of actions of every pipeline stage.

    The order equals Megatron-Core's for "1f1b" and "interleaved". "gpipe" runs all forwards, then
    all backwards.

    Args:
        name: "1f1b" (one forward, one backward; at most num_stages microbatches in flight),
            "interleaved" (the same over several chunks per stage, with a smaller bubble), or
            "gpipe".
        num_stages: Pipeline-parallel size.
        num_microbatches: Microbatches per step.
        num_chunks: Chunks per stage (vpp); above 1 only with "interleaved".
        microbatch_group_size: Number of microbatches that pass through a chunk before the next
            chunk starts, for "interleaved" only; None means num_stages.
        forward_only: Whether to omit the backwards.

    Raises:
        ParallelPlanError: For an unknown name, and for sizes that the schedule cannot run.

    Source: GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503),
        interleaved (https://arxiv.org/abs/2104.04473).
    """
    check_schedule_sizes(
        name, num_stages, num_microbatches, num_chunks, microbatch_group_size, forward_only
    )
    group = num_microbatches
    if name == "interleaved":
        group = num_stages if microbatch_group_size is None else microbatch_group_size
    forwards = _forwards(num_microbatches, num_chunks, group)
    rows = []
    for rank in range(num_stages):
        warmup = num_stages - rank - 1
        if name == "interleaved":
            warmup = 2 * warmup + (num_chunks - 1) * group
        if name == "gpipe" or forward_only:
            warmup = len(forwards)
        rows.append(
            _one_forward_one_backward(
                forwards, min(warmup, len(forwards)), num_chunks, forward_only
            )
        )
    return Schedule(
        name, num_stages, num_microbatches, num_chunks, tuple(rows), forward_only
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
        raise ParallelPlanError(
            f"schedule must be one that exists: it is {name!r}. Use {join_or(SCHEDULE_NAMES)}."
        )
    _check_chunks(name, num_stages, num_chunks, microbatch_group_size)
    # Without backwards a chunk waits only for the chunk before it, so that groups of any size work.
    if name == "interleaved" and not forward_only:
        group = num_stages if microbatch_group_size is None else microbatch_group_size
        _check_group(num_stages, num_microbatches, group)


def _forwards(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    # Pairs (chunk, microbatch): a group of microbatches passes all chunks before the next group
    # starts.
    return [
        (chunk, microbatch)
        for first in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


def _one_forward_one_backward(
    forwards: list[tuple[int, int]], warmup: int, num_chunks: int, forward_only: bool
) -> tuple[Action, ...]:
    if forward_only:
        return tuple(Action("F", *unit) for unit in forwards)
    backwards = [Action("B", num_chunks - 1 - chunk, microbatch) for chunk, microbatch in forwards]
    row = [Action("F", *unit) for unit in forwards[:warmup]]
    for unit, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [Action("F", *unit), backward]
    return tuple(row + backwards[len(forwards) - warmup :])


def _check_chunks(name: str, num_stages: int, num_chunks: int, group: int | None) -> None:
    if name != "interleaved" and num_chunks > 1:
        raise ParallelPlanError(
            f"schedule {name!r} runs one chunk per stage: vpp is {num_chunks}. Only 'interleaved' "
            "orders the chunks of a stage. Use schedule 'interleaved', or vpp of 1."
        )
    if name != "interleaved" and group is not None:
        raise ParallelPlanError(
            f"microbatch_group_size ({group}) belongs to schedule 'interleaved': schedule is "
            f"{name!r}, which has one chunk per stage and nothing to group. Use "
            "microbatch_group_size of None."
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
    require_positive("microbatch_group_size", group)
    if num_microbatches < num_stages:
        raise ParallelPlanError(
            "schedule 'interleaved' needs at least as many microbatches as stages: "
            f"num_microbatches is {num_microbatches}, pp is {num_stages}. A chunk's next turn "
            f"would come before its input. Use {num_stages} microbatches or more, or schedule "
            "'1f1b' with vpp of 1."
        )
    sizes = range(num_stages, num_microbatches + 1)
    legal = [size for size in sizes if not 0 < num_microbatches % size < num_stages]
    if group in legal:
        return
    remainder = num_microbatches % group
    values = (
        f"microbatch_group_size is {group}, pp is {num_stages}, num_microbatches is "
        f"{num_microbatches}"
    )
    if len(legal) > 6:
        legal = [*legal[:5], legal[-1]]
    if num_stages <= group <= num_microbatches:
        why = (
            f"the last group would hold {remainder}, fewer than stages, and every stage would wait "
            "for it"
        )
    else:
        why = "a smaller group would wait for its own output, a larger one never fills"
    multiple = -(-num_microbatches // num_stages) * num_stages
    raise ParallelPlanError(
        f"microbatches must fill groups of at least pp and at most all of them: {values}; {why}. "
        f"Use microbatch_group_size of {join_or(legal)}, or {multiple} microbatches."
    )
