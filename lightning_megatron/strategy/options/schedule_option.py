"""Checks of the option ``schedule``: a name, the sizes of a named schedule, or a user's order."""

from __future__ import annotations

from typing import Any

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.custom_order import CSV_SUFFIX, CustomOrder
from lightning_megatron.plan.schedule import SCHEDULE_NAMES, ScheduleName, shape_of
from lightning_megatron.plan.settings import shown


def check_schedule_name(schedule: Any) -> None:
    """Check that a text is the name of a schedule or the path of a CSV file."""
    legal = (*SCHEDULE_NAMES, "auto")
    if not isinstance(schedule, str) or schedule in legal:
        return
    if not schedule.lower().endswith(CSV_SUFFIX):
        raise ParallelPlanError(
            f"schedule must be {', '.join(legal)}, a path that ends in {CSV_SUFFIX}, a function or "
            f"None: it is {shown(schedule)}. A YAML file cannot name a function: pass the function "
            "itself in Python, or write its schedule into a file with plan.format_schedule."
        )


def check_own_order(order: CustomOrder, group_size: int | None) -> None:
    """Check that other options agree with a schedule that the user's file or function defines."""
    if group_size is not None:
        raise ParallelPlanError(
            f"microbatch_group_size ({group_size}) must be None with a custom schedule "
            f"({order.name}), which orders all microbatches. Use schedule='interleaved', or leave "
            "microbatch_group_size out."
        )


def check_named_schedule(
    schedule: Any, name: ScheduleName, pp: int, vpp: int, group_size: int | None
) -> None:
    """Check the sizes of a named schedule, or of the schedule with which "auto" begins.

    Args:
        name: Name with the default filled in; for "auto" the schedule of the first steps.
    """
    if schedule == "auto" and group_size is not None:
        raise ParallelPlanError(
            f"microbatch_group_size ({group_size}) must be None with schedule='auto', which "
            "chooses the order of microbatches. Use schedule='interleaved', or leave "
            "microbatch_group_size out."
        )
    if shape_of(name) == "v":
        if pp == 1 or vpp != 2:
            raise ParallelPlanError(
                f"schedule {schedule!r} needs pp above 1 and vpp of 2: pp is {pp}, vpp is {vpp}. "
                "Its chunks lie in a V: the first chunks go from the first stage to the last, and "
                "the second chunks go back. Use pp of 2 or more with vpp=2, or schedule='1f1b' "
                "with vpp=1."
            )
        return
    if vpp > 1 and name != "interleaved":
        raise ParallelPlanError(
            f"schedule ({schedule!r}) must be 'interleaved' with vpp ({vpp}) above 1, or 'zb-v' or "
            "'dualpipe-v' with vpp of 2, because only these run several chunks on a stage. Use one "
            "of them, or vpp=1."
        )
    if vpp == 1 and name == "interleaved":
        raise ParallelPlanError(
            "schedule 'interleaved' needs vpp above 1, because it alternates between the chunks of "
            "a stage. Use vpp of 2 or more with pp above 1, or schedule='1f1b'."
        )
