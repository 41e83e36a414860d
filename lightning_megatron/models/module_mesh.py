"""Process groups and random streams of a LightningModule that builds a model of this package."""

from __future__ import annotations

from typing import Any

import torch

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.layered import LayeredModule, single_mesh


def mesh_of_module(module: Any) -> ParallelMesh:
    """Return the process groups that MegatronStrategy set, or those of a single process.

    Raises:
        UnsupportedError: If another strategy has set a device mesh of another kind.
    """
    mesh: Any = module.device_mesh
    if isinstance(mesh, ParallelMesh):
        return mesh
    if mesh is not None:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be sharded over a {type(mesh).__name__}, because it "
            "is built from layers of lightning_megatron. Use MegatronStrategy, ddp or one device."
        )
    return single_mesh(torch.initial_seed() % 2**63)


def advance_streams(module: Any, model: LayeredModule) -> None:
    """Advance the random streams of a model to a training batch, unless MegatronStrategy does so.

    Dropout masks are those of MegatronStrategy, if its ranks take the samples of a batch in turn.
    """
    if module.device_mesh is None:
        # MegatronStrategy advances the random streams itself.
        model.mesh.random.device = module.device
        trainer = module.trainer
        rank = trainer.global_rank
        samples = rank, trainer.world_size, 0
        model.mesh.random.begin_microbatch(trainer.fit_loop.total_batch_idx, rank, samples)
