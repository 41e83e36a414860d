"""Checks of the options of experts against other options."""

from __future__ import annotations

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.expert_clones import ExpertClones
from lightning_megatron.plan.experts import Transport


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
