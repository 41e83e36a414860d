"""A user's own schedule, built from a function and checked like the named schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.schedule import Schedule
from lightning_megatron.plan.settings import require_positive, shown
from lightning_megatron.plan.simulate import simulate

RowFunction = Callable[[int, int, int, int], Iterable[Action]]
"""Function of rank, pp, number of microbatches and vpp that returns the actions of a stage."""


def custom_schedule(
    row_of: RowFunction,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    shape: PlacementShape = "loop",
    forward_only: bool = False,
    name: str | None = None,
) -> Schedule:
    """Build a schedule from a function that returns the row of every stage.

    Args:
        row_of: Function of rank, pp, number of microbatches and vpp.
        num_chunks: Chunks per stage (vpp).
        shape: Placement of the chunks on the stages: "loop" or "v".
        forward_only: Whether there is no backward.
        name: Name of the schedule in messages; None means that of the function.

    Raises:
        ParallelPlanError: If a stage does not do all its work once and in order, or stages wait for
            each other. The transfers of a schedule that passes cannot deadlock, batched
            (``plan_transfers``) or one by one (``one_by_one``).
    """
    require_positive("num_microbatches", num_microbatches)
    Placement(shape, num_stages, num_chunks)
    title = name or str(getattr(row_of, "__name__", "custom"))
    # There are four kinds of actions. One more is a repetition, which `validate` finds, so a
    # function that never ends is not read further.
    max_actions = 4 * num_microbatches * num_chunks + 1
    rows = tuple(
        _checked(
            row_of(rank, num_stages, num_microbatches, num_chunks),
            max_actions,
            f"schedule {title!r}, stage {rank}",
        )
        for rank in range(num_stages)
    )
    schedule = Schedule(
        title, num_stages, num_microbatches, num_chunks, rows, forward_only, shape
    ).validate()
    simulate(schedule)
    return schedule


def _checked(row: Any, max_actions: int, place: str) -> tuple[Action, ...]:
    """Return the actions of a row, at most a number of them."""
    if not isinstance(row, Iterable):
        raise ParallelPlanError(
            f"{place}: the row must be a sequence of actions: the function returned {shown(row)}. "
            "Use a list of Action(kind, chunk, microbatch), or yield them."
        )
    actions = tuple(islice(row, max_actions))
    for action in actions:
        if not isinstance(action, Action) or not all(
            isinstance(index, int) and not isinstance(index, bool)
            for index in (action.chunk, action.microbatch)
        ):
            raise ParallelPlanError(
                f"{place}: a row must consist of actions whose chunk and microbatch are whole "
                f"numbers: it has {shown(action)}. Use Action(kind, chunk, microbatch)."
            )
    return actions
