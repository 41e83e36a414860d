"""Second step of a swap: build everything that a plan replaces, without changing the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_megatron.swap.decide.checks import check_nothing_is_lost
from lightning_megatron.swap.decide.replacements import WHOLE_MODEL, Swap
from lightning_megatron.swap.decide.swap_plan import SwapPlan
from lightning_megatron.swap.pretrained.from_pretrained import read_missing_values
from lightning_megatron.swap.shared_weights import TargetParameter, share_weights


@dataclass(frozen=True)
class Swaps:
    """Replacements of a plan, ready for installation.

    Args:
        replacements: Replacements without values, in the order of definition.
        give_missing_values: Functions that give Hugging Face models with their own code the weights
            without which they were built.
    """

    replacements: tuple[Swap, ...]
    give_missing_values: tuple[Callable[[], None], ...]


def build(plan: SwapPlan) -> Swaps:
    """Build the replacements of a plan, and read the missing weights of models with their own code.

    The module of the plan is not changed. The replacements have no values yet, because every rank
    must get the values of the first rank before.

    Raises:
        ParallelPlanError: If a size is not divisible, or a shared weight would be sharded in two
            ways.
        UnsupportedError: If a block has settings, hooks or a layout that a swap cannot keep.
        CheckpointMismatchError: If a model has other tensors than its family.
    """
    missing = tuple(
        read_missing_values(model.site.module) for model in plan.own_code if model.is_outermost
    )
    swaps = tuple(replacement.build() for replacement in plan.replacements)
    targets = {
        source: TargetParameter(swap.target, name, swap.kind)
        for swap in swaps
        for source, name in swap.sources.items()
    }
    models = [swap.site.name for swap in swaps if swap.kind == WHOLE_MODEL]
    share_weights(plan.root, targets, models, plan.here)
    for swap in swaps:
        check_nothing_is_lost(swap.site, swap.target, stays=swap.install is not None)
    return Swaps(swaps, missing)
