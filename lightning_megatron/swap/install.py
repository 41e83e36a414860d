"""Third step of a swap: give the replacements their values, and put them into the module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.groups.collectives import broadcast_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import (
    num_elements,
    set_shard_spec,
    shard_spec_of,
    whole_spec,
)
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.blocks.sequence import gather_sequence_inputs
from lightning_megatron.swap.build import Swaps
from lightning_megatron.swap.decide.block_choice import SEQUENCE_KINDS
from lightning_megatron.swap.decide.hugging_face_models import OwnCodeModel
from lightning_megatron.swap.decide.kinds import SWAPPED_AS
from lightning_megatron.swap.decide.model_plan import whole_parts
from lightning_megatron.swap.decide.record import SwapRecord
from lightning_megatron.swap.decide.replacements import WHOLE_MODEL, Swap
from lightning_megatron.swap.decide.swap_plan import SwapPlan
from lightning_megatron.swap.hugging_face.peft_model import keep_wrappers
from lightning_megatron.swap.hugging_face.save_pretrained import save_from_all_ranks


def install(plan: SwapPlan, swaps: Swaps) -> list[SwapRecord]:
    """Give all ranks the values of the first rank, fill the replacements, and put them in place.

    All replacements are filled before the first one is put in place.

    Args:
        plan: Decisions for the module.
        swaps: Replacements, built for the plan.

    Returns:
        Records of the swapped blocks, in the order of definition.

    Raises:
        CheckpointMismatchError: If a tied head in a folder differs from the embedding.

    Communication: a broadcast over all ranks for each parameter and buffer.
    """
    for give in swaps.give_missing_values:
        give()
    broadcast_values(plan.root, plan.built_here, plan.mesh)
    records = [_kept_record(model) for model in plan.own_code if model.reason]
    records += [_record(swap, swap.fill()) for swap in swaps.replacements]
    sizes_before = [num_elements(model.site.module) for model in plan.own_code]
    targets: dict[int, nn.Module] = {}
    cuts_sequence = any(swap.kind == "sequence" for swap in swaps.replacements)
    for swap in swaps.replacements:
        if swap.install is not None:
            swap.install()
            continue
        targets[id(swap.site.module)] = swap.target
        setattr(swap.target, SWAPPED_AS, swap.kind)
        if cuts_sequence and swap.kind not in (*SEQUENCE_KINDS, WHOLE_MODEL):
            gather_sequence_inputs(swap.target)
    for site in plan.sites:
        # A module with several names is replaced at each of them.
        if site.closed_by is None and id(site.module) in targets:
            setattr(site.parent, site.key, targets[id(site.module)])
    for name in plan.partial:
        for parameter in plan.root.get_submodule(name).parameters():
            set_shard_spec(parameter, whole_spec(parameter, plan.mesh.tp.rank, partial=True))
    if plan.stages is not None:
        records.append(plan.stages.install(plan.root))
    keep_wrappers(plan.root)
    save_from_all_ranks(model.site.module for model in plan.own_code)
    return records + [
        _planned_record(model, size)
        for model, size in zip(plan.own_code, sizes_before, strict=True)
        if model.plan is not None
    ]


def broadcast_values(root: nn.Module, built_here: tuple[str, ...], mesh: ParallelMesh) -> None:
    """Broadcast the first rank's parameters and buffers to all ranks, in place.

    Ranks with different seeds would otherwise have shards of different tensors. Shards and tensors
    on the meta device are skipped.

    Args:
        root: Module with the same tensors on all ranks.
        built_here: Names of models that are skipped, because their ranks have different layers.
        mesh: Process groups of this rank.

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


def _record(swap: Swap, note: str) -> SwapRecord:
    source = swap.site.module
    kind = type(swap.target)
    if swap.install is not None and isinstance(swap.target, GPT):
        # The layers of a Hugging Face model are of a class of their own, which users do not know.
        kind = kind.__bases__[0]
    return SwapRecord(
        swap.site.name,
        swap.kind,
        type(source).__name__,
        kind.__name__,
        num_elements(source),
        num_elements(swap.target),
        note,
    )


def _kept_record(model: OwnCodeModel) -> SwapRecord:
    kind = type(model.site.module).__name__
    size = num_elements(model.site.module)
    note = f"It keeps its own code, because {model.reason}"
    return SwapRecord(model.site.name, "Hugging Face's own module", kind, kind, size, size, note)


def _planned_record(model: OwnCodeModel, size_before: int) -> SwapRecord:
    module = model.site.module
    kind = type(module).__name__
    return SwapRecord(
        model.site.name,
        str(model.plan),
        kind,
        kind,
        size_before,
        num_elements(module),
        whole_parts(module),
    )
