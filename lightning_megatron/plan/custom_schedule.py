"""A user's own schedule: a function that orders the passes, checked like the named schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.actions import Action
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.schedule import (
    NAMED_SCHEDULES,
    Schedule,
    ScheduleName,
    build_schedule,
    forward_schedule,
)
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
    name: str | None = None,
) -> Schedule:
    """Build a schedule from a function that returns the row of every stage.

    Args:
        row_of: Function of rank, pp, number of microbatches and vpp.
        num_chunks: Chunks per stage (vpp).
        shape: Placement of the chunks on the stages: "loop" or "v".
        name: Name of the schedule in messages; None means that of the function.

    Raises:
        ParallelPlanError: If a stage does not do all its work once and in order, or stages wait for
            each other. The transfers of a schedule that passes cannot deadlock
            (``plan_transfers``).
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
        title, num_stages, num_microbatches, num_chunks, rows, shape=shape
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


@dataclass(frozen=True, eq=False)
class CustomOrder:
    """Order of passes that the user's function gives, for any number of microbatches.

    Without backwards, as in validation, microbatches pass the same placement in the order of a
    named schedule.

    Args:
        name: Name of the function, in messages.
    """

    name: str
    row_of: RowFunction
    placement: Placement
    _built: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, row_of: RowFunction, num_stages: int, num_chunks: int) -> CustomOrder:
        """Return the order of passes of a function; several chunks lie in a loop."""
        name = str(getattr(row_of, "__qualname__", type(row_of).__name__))
        return cls(name, row_of, Placement("loop", num_stages, num_chunks))

    def __repr__(self) -> str:
        # Ranks compare this text, in which the function has no address.
        sizes = f"pp={self.placement.num_stages}, vpp={self.placement.num_chunks}"
        return f"function {self.name} ({sizes})"

    def build(self, num_microbatches: int, forward_only: bool = False) -> Schedule:
        """Return the checked schedule of a step.

        Raises:
            ParallelPlanError: If the function fails, or its rows are not a legal schedule.
        """
        if forward_only:
            return forward_schedule(self.name, self.placement, num_microbatches)
        if num_microbatches not in self._built:
            self._built[num_microbatches] = self._checked(num_microbatches)
        return self._built[num_microbatches]

    def _checked(self, num_microbatches: int) -> Schedule:
        num_stages = self.placement.num_stages
        num_chunks = self.placement.num_chunks
        try:
            return custom_schedule(
                self.row_of, num_stages, num_microbatches, num_chunks, name=self.name
            )
        except ParallelPlanError:
            raise
        except Exception as error:
            raise ParallelPlanError(
                f"the function of schedule {self.name!r} must return the rows of every number of "
                f"microbatches that a step has: for pp {num_stages}, {num_microbatches} "
                f"microbatches and vpp {num_chunks} it raised {type(error).__name__}: {error}. Use "
                "a number of microbatches that it supports, or a named schedule."
            ) from error


OrderOfPasses = ScheduleName | CustomOrder
"""Named schedule, or the user's own order."""


def build_order(
    order: OrderOfPasses,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    is_paired: bool = False,
) -> Schedule:
    """Build the schedule of a training step.

    Args:
        order: Named schedule, or the user's own order, whose sizes are those given here.
        num_chunks: Chunks per stage (vpp).
        group_size: Group size of "interleaved", see ``build_schedule``.
        is_paired: Whether stages switch between passes, see ``build_schedule``.

    Raises:
        ParallelPlanError: For sizes that the order cannot run.
    """
    if isinstance(order, CustomOrder):
        return order.build(num_microbatches)
    return build_schedule(
        order, num_stages, num_microbatches, num_chunks, group_size, is_paired=is_paired
    )


def shape_of_order(order: OrderOfPasses) -> PlacementShape:
    """Return how an order places chunks on the stages."""
    return order.placement.shape if isinstance(order, CustomOrder) else NAMED_SCHEDULES[order].shape


def order_may_split(order: OrderOfPasses) -> bool:
    """Return whether an order may run some backward passes in halves, as a function may."""
    return isinstance(order, CustomOrder) or NAMED_SCHEDULES[order].splits
