"""Schedules whose backward passes are split into an input half and a later weight half."""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.plan.schedule import Action, Schedule


def with_halves(schedule: Schedule, delay: int = 1) -> Schedule:
    """Replace every backward pass by its halves.

    Args:
        schedule: The schedule to change.
        delay: Number of input halves of its stage for which each weight half waits. The last
            weight halves run at the end, in order.
    """
    if schedule.forward_only:
        return schedule
    rows = []
    for row in schedule.rows:
        split: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            if action.kind != "B":
                split.append(action)
                continue
            split.append(replace(action, kind="I"))
            waiting.append(replace(action, kind="W"))
            if len(waiting) > delay:
                split.append(waiting.pop(0))
        rows.append((*split, *waiting))
    return replace(schedule, rows=tuple(rows)).validate()
