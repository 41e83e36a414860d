"""In-place replacement of a module's blocks by tensor-parallel ones: decide, build, install."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import broadcast_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import (
    num_elements,
    replicated_spec,
    set_shard_spec,
    shard_spec_of,
)
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import named_layers
from lightning_megatron.models.staged_blocks import StagedBlocks
from lightning_megatron.swap.decide.hugging_face_models import OwnCodeModel
from lightning_megatron.swap.decide.kinds import SWAPPED_AS, SwapRecord
from lightning_megatron.swap.decide.model_plan import describe_unsharded
from lightning_megatron.swap.decide.swap_plan import Swap, SwapPlan, decide
from lightning_megatron.swap.hugging_face.bound_methods import bind_methods, whole_counts
from lightning_megatron.swap.preservation import check_nothing_is_lost, share_weights
from lightning_megatron.swap.pretrained.from_pretrained import read_missing_values


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
    :func:`build` do not change the module: if one of them raises an error, its submodules,
    parameters, values and hooks are unchanged. :func:`install` then gives every rank the values of
    the first rank, fills all replacements with their parts of the values, and puts them in place.

    :mod:`lightning_megatron.swap.decide.kinds` explains the kinds of the plan. Patterns
    (``fnmatch`` over dotted names; ``*`` matches dots too) that come later in the plan override
    earlier ones. A GPT or Encoder that was built in full is always rebuilt on ``mesh``. With tp=1
    nothing else is swapped, but the plan is checked. A plan must exclude modules that use the
    weight of a layer without calling the layer. :func:`~lightning_megatron.swap.apply.rejoin`
    moves a module that was swapped in an earlier run to ``mesh``.

    With pp above 1, the list of blocks of any other model is divided among the stages. Modules
    before and after the list are only on the first and the last stage: see
    :func:`~lightning_megatron.swap.decide.stages.plan_stages`.

    Args:
        plan: Kind of each module, by name pattern; None means ``auto`` for all.
        pipeline_plan: ``blocks``, ``first`` or ``last`` by name pattern; None means the stages that
            a Hugging Face model defines.
        needs_tables: Whether an option was set that only models of this package support. If so, a
            Hugging Face model with a setting that its family does not support raises an error;
            otherwise such a model is not replaced.

    Returns:
        Records of the swapped blocks, in the order of definition.

    Communication: a broadcast over all ranks for each parameter and buffer.
    """
    if any(isinstance(part, StagedBlocks) for part in module.modules()):
        # An earlier fit has swapped all modules. The plan is not checked again, because its
        # patterns may name modules of other stages, which this rank no longer has.
        return []
    swap_plan = decide(module, mesh, plan, pipeline_plan, shows_progress, needs_tables)
    # Weights of models that keep their own code are read before anything is changed.
    missing = [
        read_missing_values(model.site.module) for model in swap_plan.own_code if model.is_outermost
    ]
    swaps = build(swap_plan)
    for give in missing:
        give()
    return install(swap_plan, swaps)


def build(plan: SwapPlan) -> list[Swap]:
    """Build the replacements of a plan, without values; the module of the plan is not changed."""
    swaps = [replacement.build() for replacement in plan.replacements]
    share_weights(plan.root, swaps, plan.stage_modules)
    for swap in swaps:
        check_nothing_is_lost(swap)
    return swaps


def install(plan: SwapPlan, swaps: Sequence[Swap]) -> list[SwapRecord]:
    """Broadcast the values of the first rank, fill the replacements, and put them in place.

    All replacements are filled before the first one is put in place.

    Returns:
        Records of the swapped blocks, in the order of definition.

    Communication: a broadcast over all ranks for each parameter and buffer.
    """
    counts = whole_counts(plan.root) if plan.mesh.model.size > 1 else ()
    broadcast_values(plan.root, plan.built_here, plan.mesh)
    sizes = [num_elements(model.site.module) for model in plan.own_code]
    full_sizes = [num_elements(swap.site.module) for swap in swaps]
    records = [
        _own_code_record(
            model,
            "Hugging Face's own module",
            size,
            f"It keeps its own code, because {model.reason}",
        )
        for model, size in zip(plan.own_code, sizes, strict=True)
        if model.reason
    ]
    notes = [swap.fill() for swap in swaps]
    targets: dict[int, nn.Module] = {}
    for swap in swaps:
        if swap.install is None:
            targets[id(swap.site.module)] = swap.target
            setattr(swap.target, SWAPPED_AS, swap.kind)
    for site in plan.sites:
        # A module with several names is replaced at each of them.
        if site.closed_by is None and id(site.module) in targets:
            setattr(site.parent, site.key, targets[id(site.module)])
    for swap in swaps:
        if swap.install is not None:
            swap.install()
    records += map(_record, swaps, full_sizes, notes)
    for name in plan.partial:
        for parameter in plan.root.get_submodule(name).parameters():
            set_shard_spec(parameter, replicated_spec(parameter, plan.mesh.tp.rank, partial=True))
    if plan.stages is not None:
        records.append(plan.stages.install(plan.root))
    bind_methods(plan.root, [model.site.module for model in plan.own_code], counts)
    return records + [
        _own_code_record(model, str(model.plan), size, describe_unsharded(model.site.module))
        for model, size in zip(plan.own_code, sizes, strict=True)
        if model.plan is not None
    ]


def broadcast_values(root: nn.Module, built_here: tuple[str, ...], mesh: ParallelMesh) -> None:
    """Broadcast the first rank's parameters and buffers to all ranks, in place.

    Without this, ranks with different seeds would have shards of different tensors. Shards and
    tensors on the meta device are skipped.

    Args:
        built_here: Names of models that were built on the mesh. They are skipped, because ranks
            have different layers of them.

    Communication: one broadcast over all ranks for each tensor.
    """
    if mesh.world.size == 1:
        return
    tensors = dict(root.named_parameters()) | dict(root.named_buffers())
    for name, tensor in tensors.items():
        is_skipped = any(name.startswith(f"{model}.") for model in built_here)
        if not is_skipped and not tensor.is_meta and shard_spec_of(tensor).is_whole:
            _broadcast(tensor, mesh)


@torch.no_grad()
def _broadcast(tensor: Tensor, mesh: ParallelMesh) -> None:
    values = tensor.detach().contiguous()
    # Every dtype can be sent as bytes.
    sent = values.reshape(-1).view(torch.uint8)
    broadcast_(sent, mesh.world_cpu if tensor.device.type == "cpu" else mesh.world)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)


def _record(swap: Swap, size_before: int, note: str) -> SwapRecord:
    source = swap.site.module
    kind = type(swap.target)
    if swap.install is not None and isinstance(swap.target, GPT):
        # Layers of a replaced Hugging Face model have a class that users do not know.
        kind = kind.__bases__[0]
    return SwapRecord(
        swap.site.name,
        swap.kind,
        type(source).__name__,
        kind.__name__,
        size_before,
        num_elements(swap.target),
        note,
    )


def _own_code_record(model: OwnCodeModel, what: str, size_before: int, note: str) -> SwapRecord:
    kind = type(model.site.module).__name__
    size = num_elements(model.site.module)
    return SwapRecord(model.site.name, what, kind, kind, size_before, size, note)


def rejoin(root: nn.Module, mesh: ParallelMesh) -> None:
    """Move modules that were sharded in an earlier run to the process groups of this run.

    A second fit of a module creates new process groups. The shards remain valid if the layout and
    the rank are the same.
    """
    moved: list[tuple[nn.Module, ParallelMesh]] = []
    for name, module in named_layers(root):
        old = vars(module).get("mesh")
        # Meshes with and without sequence parallelism share one set of random streams.
        if not isinstance(old, ParallelMesh) or old.random is mesh.random:
            continue
        # A module that was built for one process has full weights, which are sharded later. For one
        # process on the same device it is moved: an earlier run may have its weights in higher
        # precision.
        if old.layout.world_size == 1 and (old.layout, old.device) != (mesh.layout, mesh.device):
            continue
        if (old.layout, old.rank) != (mesh.layout, mesh.rank):
            raise UnsupportedError(
                "a module can only be used again with the layout that it was sharded for, because "
                f"its weights are parts: {name!r} was sharded for {old.layout} and rank "
                f"{old.rank}, this run has {mesh.layout} and rank {mesh.rank}. Build a new module, "
                "and pass ckpt_path to continue with its weights."
            )
        moved.append((module, old))
    for module, old in moved:
        same = old.sequence_parallel == mesh.sequence_parallel
        new_mesh = mesh if same else replace(mesh, sequence_parallel=old.sequence_parallel)
        setattr(module, "mesh", new_mesh)  # noqa: B010 - a module may have any attribute
