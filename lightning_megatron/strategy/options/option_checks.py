"""Checks of the options of experts and of the schedule against other options."""

from __future__ import annotations

from typing import Any

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.custom_order import CSV_SUFFIX, CustomOrder
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import Transport
from lightning_megatron.plan.schedule import SCHEDULE_NAMES, ScheduleName, shape_of
from lightning_megatron.plan.settings import shown


def check_expert_rows(rows: float | None, ep: int, transport: Transport) -> None:
    """Refuse a limit on the rows of experts if no buffer can have one.

    Args:
        rows: Limit on the rows of a rank's experts, as a multiple of the even share; None without
            a limit.
        ep: Ranks that share the experts of a layer (ranks).
    """
    if rows is None:
        return
    if ep == 1:
        raise ParallelPlanError(
            f"experts.rows ({rows:g}) needs ep above 1: a rank that holds all experts always gets "
            "the same number of rows. Use ep of 2 or more, or experts.rows=None."
        )
    if transport == "all_to_all":
        raise ParallelPlanError(
            f"experts.rows ({rows:g}) needs experts.transport of one_sided, all_gather or auto: "
            "with all_to_all the host reads the number of rows, and buffers have exactly this "
            "size. Use one of the three, or experts.rows=None."
        )


def check_expert_clones(clones: ExpertClones | None, ep: int, transport: Transport) -> None:
    """Refuse clones of experts if the layout or the transport cannot have them.

    Args:
        clones: Places for clones of experts; None without clones.
        ep: Ranks that share the experts of a layer (ranks).
    """
    if clones is None:
        return
    if ep == 1:
        raise ParallelPlanError(
            f"experts.clones ({clones.places}) needs ep above 1: a clone computes rows for an "
            "expert of another rank, and here every rank has all experts. Use ep of 2 or more, or "
            "experts.clones=0."
        )
    if transport not in ("auto", "one_sided"):
        raise ParallelPlanError(
            f"experts.clones ({clones.places}) needs experts.transport of one_sided or auto: it is "
            f"{transport}. Like the tokens of one_sided, weights of clones are written into the "
            "memory of other GPUs. Use one of the two, or experts.clones=0."
        )


def check_limited_step(is_automatic: bool) -> None:
    """Refuse training steps that the strategy cannot run again without the limit on rows."""
    if not is_automatic:
        raise UnsupportedError(
            "experts.rows needs automatic optimization: a step that needs more rows is run again, "
            "and the strategy cannot repeat the backward passes of user code. Use "
            "automatic_optimization=True, or experts.rows=None."
        )


def check_limited_sums(changer: str | None) -> None:
    """Refuse gradient accumulation that the strategy cannot run again without the limit on rows.

    Args:
        changer: Hook that may change gradients between accumulated batches; None without one.
    """
    if changer is not None:
        raise UnsupportedError(
            f"experts.rows with accumulated gradients cannot be used with {changer}, which may "
            "change gradients between batches: a batch that needs more rows is run again with all "
            "earlier batches of its optimizer step, which would lose its changes. Change gradients "
            "in on_before_optimizer_step, set reads_gradients = False in the class of the hook if "
            "it changes none, or use experts.rows=None."
        )


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
