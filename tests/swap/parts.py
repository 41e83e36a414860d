"""Parts of models as their ranks hold them, without any process but this one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.gpt import GPT
from lightning_megatron.plan.layout import ParallelLayout


def mesh_of(tp: int = 1, pp: int = 1, tp_rank: int = 0, pp_rank: int = 0) -> ParallelMesh:
    """Return the mesh of a rank without processes, for what happens before any communication."""
    axes = {"tp": MeshAxis("tp", tuple(range(tp)), tp_rank), "pp": MeshAxis("pp", tuple(range(pp)), pp_rank)}
    return replace(ParallelMesh.single(), layout=ParallelLayout(tp * pp, tp=tp, pp=pp), **axes)


def part_on_meta(config: Any, mesh: ParallelMesh) -> GPT:
    """Return a rank's part of a model, without values."""
    with torch.device("meta"):
        return GPT(config, mesh)


def full_tensors(model: GPT) -> dict[str, Tensor]:
    """Return the full tensors of a model that is in one process."""
    found = {}
    for name, parameter in model.named_parameters():
        spec = shard_spec_of(parameter)
        found[name] = parameter.new_empty(spec.full_shape)
        spec.copy_to_full(parameter.detach(), found[name])
    return found
