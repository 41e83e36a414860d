"""A user's own order of passes for a training: a CSV file, or a function."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CorruptDataError, ParallelPlanError
from lightning_megatron.plan.custom_schedule import RowFunction, custom_schedule
from lightning_megatron.plan.placement import Placement, PlacementShape
from lightning_megatron.plan.schedule import (
    Schedule,
    ScheduleName,
    build_schedule,
    forward_schedule,
    shape_of,
    splits_backward,
)
from lightning_megatron.plan.schedule_csv import format_schedule, read_schedule

CSV_SUFFIX = ".csv"
"""Ending of the names of files with a schedule."""


@dataclass(frozen=True, eq=False)
class CustomOrder:
    """Order of passes that the user has given, with the placement of the chunks.

    A file orders one number of microbatches, and a function any number. Without backwards, as in
    validation, microbatches pass the same placement in the order of a named schedule.

    Args:
        name: Path of the file or name of the function, in messages.
        row_of: Function of rank, pp, number of microbatches and vpp that returns the actions of a
            stage.
        placement: Placement of the chunks on the stages.
        table: Schedule of the file; None for a function.
    """

    name: str
    row_of: RowFunction
    placement: Placement
    table: Schedule | None = None
    _built: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        # Ranks compare this text: a file may have another path on each rank, but must have the same
        # rows.
        sizes = f"pp={self.placement.num_stages}, vpp={self.placement.num_chunks}"
        if self.table is None:
            return f"function {self.name} ({sizes})"
        return f"rows {digest_of(self.table)} ({sizes})"

    @property
    def num_microbatches(self) -> int | None:
        """Return the only number of microbatches that the order is for; None for any number."""
        return None if self.table is None else self.table.num_microbatches

    @property
    def may_split(self) -> bool:
        """Return whether backward passes run in halves; a function may do so for some number."""
        if self.table is None:
            return True
        return any(action.kind == "I" for row in self.table.rows for action in row)

    def build(self, num_microbatches: int, forward_only: bool = False) -> Schedule:
        """Return the checked schedule of a step.

        Args:
            num_microbatches: Microbatches of the step.
            forward_only: Whether there is no backward.

        Raises:
            ParallelPlanError: If a file has another number of microbatches, if the function fails,
                or if its rows are not a legal schedule.
        """
        if forward_only:
            return forward_schedule(self.name, self.placement, num_microbatches)
        if num_microbatches not in self._built:
            self._built[num_microbatches] = self._checked(num_microbatches)
        return self._built[num_microbatches]

    def _checked(self, num_microbatches: int) -> Schedule:
        if self.table is not None:
            if num_microbatches != self.table.num_microbatches:
                raise ParallelPlanError(
                    f"schedule {self.name!r} orders {self.table.num_microbatches} microbatches: a "
                    f"step has {num_microbatches}. A file is valid for one number of microbatches. "
                    f"Use batches of {self.table.num_microbatches} x microbatch_size samples on "
                    "each data-parallel rank, with drop_last=True if the last batch of an epoch is "
                    "smaller; or a function, which can order any number of microbatches."
                )
            return self.table
        placement = self.placement
        num_stages = placement.num_stages
        num_chunks = placement.num_chunks
        try:
            return custom_schedule(
                self.row_of,
                num_stages,
                num_microbatches,
                num_chunks,
                shape=placement.shape,
                name=self.name,
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


def order_from_file(path: str, num_stages: int, num_chunks: int) -> CustomOrder:
    """Read an order from a CSV file, such as ``lightning-megatron schedule --csv`` writes.

    Args:
        path: File of at most ``MAX_CSV_BYTES`` in UTF-8.
        num_stages: Pipeline-parallel size of the training.
        num_chunks: Chunks per stage (vpp) of the training.

    Raises:
        ParallelPlanError: If the file cannot be read, is not a legal schedule, has other sizes, or
            has no backwards.
    """
    try:
        table = read_schedule(Path(path))
    except CorruptDataError as error:
        raise ParallelPlanError(
            f"schedule must be the name of a schedule, or a CSV file with its rows: {error}"
        ) from error
    table_sizes = (table.num_stages, table.num_chunks)
    if table_sizes != (num_stages, num_chunks):
        raise ParallelPlanError(
            f"schedule {path!r} must have pp rows with vpp chunks each: it has {table_sizes[0]} "
            f"rows with {table_sizes[1]} chunks, pp is {num_stages}, vpp is {num_chunks}. Use "
            f"pp={table_sizes[0]} with vpp={table_sizes[1]}, or another file."
        )
    if table.forward_only:
        raise ParallelPlanError(
            f"schedule {path!r} must have backward passes: all its cells are forward passes (F). "
            "Training needs a B, or an I and a W, after each F. Use a file with backward passes; "
            "evaluation needs no schedule file."
        )

    def row_of(rank: int, *sizes: int) -> Any:
        return table.rows[rank]

    return CustomOrder(path, row_of, table.placement, table)


def order_from_function(row_of: RowFunction, num_stages: int, num_chunks: int) -> CustomOrder:
    """Return the order of passes of a function; several chunks lie in a loop.

    Args:
        row_of: Function of rank, pp, number of microbatches and vpp that returns the actions of a
            stage.
        num_chunks: Chunks per stage (vpp).
    """
    name = str(getattr(row_of, "__qualname__", type(row_of).__name__))
    return CustomOrder(name, row_of, Placement("loop", num_stages, num_chunks))


def digest_of(schedule: Schedule) -> str:
    """Return a hash of the rows of a schedule."""
    return hashlib.sha256(format_schedule(schedule).encode()).hexdigest()[:16]


def build_order(
    order: OrderOfPasses,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> Schedule:
    """Build the schedule of a training step.

    Args:
        order: Named schedule, or the user's own order, whose sizes are those given here.
        num_chunks: Chunks per stage (vpp).
        group_size: Group size of "interleaved", see ``build_schedule``.

    Raises:
        ParallelPlanError: For sizes that the order cannot run.
    """
    if isinstance(order, CustomOrder):
        return order.build(num_microbatches)
    return build_schedule(order, num_stages, num_microbatches, num_chunks, group_size)


def shape_of_order(order: OrderOfPasses) -> PlacementShape:
    """Return how an order places chunks on the stages."""
    return order.placement.shape if isinstance(order, CustomOrder) else shape_of(order)


def order_may_split(order: OrderOfPasses) -> bool:
    """Return whether an order runs some backward passes in halves."""
    return order.may_split if isinstance(order, CustomOrder) else splits_backward(order)
