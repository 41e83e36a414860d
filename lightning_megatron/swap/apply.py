"""In-place replacement of a module's blocks by tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.swap.build import build
from lightning_megatron.swap.decide.record import SwapRecord
from lightning_megatron.swap.decide.swap_plan import SwapOptions, decide
from lightning_megatron.swap.install import install


def parallelize(
    module: nn.Module,
    mesh: ParallelMesh,
    plan: Mapping[str, str] | None = None,
    pipeline_plan: Mapping[str, str] | None = None,
    shows_progress: bool = False,
    needs_tables: bool = False,
) -> list[SwapRecord]:
    """Replace blocks below ``module`` by tensor-parallel ones with this rank's weights.

    Outputs, gradients and training equal those of the original module, and parameters keep their
    names. Blocks outside the plan do not change, and every tensor-parallel rank computes them in
    full. Swapped blocks take and return complete tensors (except between ``column`` and ``row``),
    so gradients outside them are complete and equal on all tensor-parallel ranks.

    This takes three steps. :func:`~lightning_megatron.swap.decide.swap_plan.decide` and
    :func:`~lightning_megatron.swap.build.build` do not change the module: if one of them raises an
    error, its modules, parameters, values and hooks are as before.
    :func:`~lightning_megatron.swap.install.install` then gives every rank the values of the first
    rank, fills all replacements with their parts of the values, and puts them in place.

    :mod:`lightning_megatron.swap.decide.kinds` explains the kinds of the plan. Patterns
    (``fnmatch`` over dotted names; ``*`` matches dots too) that come later in the plan override
    earlier ones. A GPT or Encoder built whole always becomes one on ``mesh``. With tp=1 nothing
    else is swapped, but the plan is checked. Exclude modules that use the weight of a layer without
    calling the layer. :func:`~lightning_megatron.swap.rejoin.rejoin` moves a module that was
    swapped in an earlier run to ``mesh``.

    With pp above 1, any other model keeps this rank's part of a list of its blocks. The modules
    before and after the list run on the first and the last stage alone: see
    :func:`~lightning_megatron.swap.decide.stages.plan_stages`.

    Args:
        module: Root module, whose children are replaced in place.
        mesh: Process groups of this rank.
        plan: Kind by name pattern, or None.
        pipeline_plan: ``blocks``, ``first`` or ``last`` by name pattern; None means the stages that
            a Hugging Face model defines.
        shows_progress: Whether rank 0 may show a progress bar for the weights on a terminal.
        needs_tables: Whether an option was set that only models of this package support. Otherwise
            a Hugging Face model with a setting that its family's table refuses is not replaced.

    Returns:
        Records of the swapped blocks, in the order of definition.

    Raises:
        ParallelPlanError: If a pattern or a kind matches no module, a size is not divisible, or a
            shared weight would be sharded in two ways.
        UnsupportedError: If a block has settings, hooks or a layout that a swap cannot keep.

    Communication: a broadcast over all ranks for each parameter and buffer.
    """
    if any(isinstance(part, StagedBlocks) for part in module.modules()):
        # An earlier fit has swapped everything. The plan is not checked again, because its patterns
        # may name modules of other stages.
        return []
    options = SwapOptions(plan, pipeline_plan, shows_progress, needs_tables)
    swap_plan = decide(module, mesh, options)
    swaps = build(swap_plan)
    return install(swap_plan, swaps)
