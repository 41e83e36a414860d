"""Broadcast of parameters and buffers before each rank keeps its part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import broadcast_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.swap.blocks.whole_model import is_foreign
from lightning_megatron.swap.decide.kinds import Place


def agree_on_values(root: nn.Module, places: list[Place], mesh: ParallelMesh) -> None:
    """Broadcast the first rank's parameters and buffers to all ranks, in place.

    Ranks with different seeds would otherwise have shards of different tensors. Models built on
    ``mesh`` are skipped, because their ranks have different layers, and so are shards and tensors
    on the meta device.

    Communication: one broadcast over all ranks for each tensor.
    """
    if mesh.world.size == 1:
        return
    built_here = [
        place.name
        for place in places
        if place.closed_by is None and _is_built_here(place.module, mesh)
    ]
    tensors = dict(root.named_parameters()) | dict(root.named_buffers())
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise UnsupportedError(
                f"the lazy parameter {name!r} has no shape yet, so ranks cannot agree on its "
                "value. Run one batch through the module in configure_model, or give the layer its "
                "sizes."
            )
        if tensor.is_meta or not shard_spec_of(tensor).is_whole:
            continue
        if not any(name.startswith(f"{model}.") for model in built_here):
            _send_first(tensor, mesh)


def _is_built_here(module: nn.Module, mesh: ParallelMesh) -> bool:
    return getattr(module, "mesh", None) is mesh and not is_foreign(module, mesh)


@torch.no_grad()
def _send_first(tensor: Tensor, mesh: ParallelMesh) -> None:
    values = tensor.detach().contiguous()
    # Every dtype can be sent as bytes.
    sent = values.reshape(-1).view(torch.uint8)
    broadcast_(sent, mesh.world_cpu if tensor.device.type == "cpu" else mesh.world)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
