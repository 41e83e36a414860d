"""Checks of the sizes that each named schedule can run, with the reason and the legal sizes."""

from __future__ import annotations

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.settings import join_or, require_positive


def check_v(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, forward_only: bool
) -> None:
    """Check the sizes of a schedule whose chunks lie in a V.

    Raises:
        ParallelPlanError: Unless vpp is 2, and for dualpipe-v with too few microbatches.
    """
    if num_chunks != 2:
        raise ParallelPlanError(
            f"schedule {name!r} runs two chunks per stage: vpp is {num_chunks}. The first chunks "
            "go from the first stage to the last in a V, and the second chunks go back. Use vpp of "
            "2."
        )
    if name == "dualpipe-v" and not forward_only and num_microbatches < 2 * num_stages:
        raise ParallelPlanError(
            "schedule 'dualpipe-v' needs at least two microbatches per stage: num_microbatches is "
            f"{num_microbatches}, pp is {num_stages}. With fewer, the two directions of the V "
            f"would not overlap. Use {2 * num_stages} microbatches or more, or schedule 'zb-v'."
        )


def check_chunks(name: str, num_stages: int, num_chunks: int, group: int | None) -> None:
    """Check the number of chunks, and that only interleaved has a group size.

    Raises:
        ParallelPlanError: For numbers that the schedule cannot run.
    """
    if name in ("gpipe", "1f1b", "zb-h1", "zb-h2") and num_chunks > 1:
        raise ParallelPlanError(
            f"schedule {name!r} runs one chunk per stage: vpp is {num_chunks}. It cannot order "
            "several chunks of a stage. Use schedule 'interleaved', or vpp of 1."
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


def check_group(num_stages: int, num_microbatches: int, group: int) -> None:
    """Check the group size of interleaved.

    Raises:
        ParallelPlanError: For groups that would wait for themselves or for each other.
    """
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
    remainder = num_microbatches % group
    values = (
        f"microbatch_group_size is {group}, pp is {num_stages}, num_microbatches is "
        f"{num_microbatches}"
    )
    if len(legal) > 6:
        legal = [*legal[:5], legal[-1]]
    if num_stages <= group <= num_microbatches:
        why = (
            f"the last group would hold {remainder}, fewer than the stages, and every stage would "
            "wait for it"
        )
    else:
        why = "a smaller group would wait for its own output, and a larger one would never fill"
    multiple = -(-num_microbatches // num_stages) * num_stages
    raise ParallelPlanError(
        f"microbatch groups must have at least pp microbatches and at most all: {values}; {why}. "
        f"Use microbatch_group_size of {join_or(legal)}, or {multiple} microbatches."
    )
