"""Bring Lightning's checkpoint dictionary and this project's sharded directories together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint import (
    copy_full_tensors,
    is_sharded_checkpoint,
    load_metadata,
    load_model,
    load_optimizer,
    load_rank_state,
    model_placements,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
    save_checkpoint,
)
from lightning_megatron.errors import CheckpointMismatchError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement, ShardSpec
from lightning_megatron.training.main_parameters import MainParameters

_PREFIX = "state_dict."
_OPTIMIZERS = "megatron_optimizers"


def local_state_dict(module: LightningModule, main: MainParameters) -> dict[str, Tensor]:
    """Return this rank's shards by name, in full precision where there are main parameters."""
    kept = module.state_dict().keys()
    names = {name.removeprefix(_PREFIX): entry.tensor for name, entry in model_tensors(module, main).items()}
    return {name: tensor for name, tensor in names.items() if name in kept}


def save(
    path: str | os.PathLike[str],
    checkpoint: dict[str, Any],
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    main: MainParameters,
    mesh: ParallelMesh,
    dataloaders: list[Any],
) -> None:
    """Write Lightning's checkpoint as a directory that any layout can load.

    Args:
        path: The directory.
        checkpoint: What Lightning collected; tensors are taken from the module and the optimizers, as far as the
            checkpoint still names them after the user's ``on_save_checkpoint``.
        module: The module that is saved.
        optimizers: Its optimizers, over the mains.
        main: Its parameters.
        mesh: The groups of this rank.
        dataloaders: States of the dataloaders that can be resumed, of this rank.

    Communication: collective over all ranks.
    """
    kept = checkpoint.pop("state_dict", {})
    tensors = {name: entry for name, entry in model_tensors(module, main).items() if name.removeprefix(_PREFIX) in kept}
    if checkpoint.pop("optimizer_states", None) is not None:
        for index, optimizer in enumerate(optimizers):
            tensors |= optimizer_tensors(index, optimizer, main)
        checkpoint[_OPTIMIZERS] = [optimizer_metadata(optimizer, main, mesh) for optimizer in optimizers]
    rank_state = {"random": mesh.random.state_dict(), "dataloaders": dataloaders}
    save_checkpoint(path, tensors, checkpoint, rank_state, mesh)


def load(
    path: str | os.PathLike[str],
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    main: MainParameters,
    mesh: ParallelMesh,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Fill module and optimizers from a checkpoint; return what is left for Lightning.

    Args:
        path: A directory of :func:`save`, or a file that another strategy saved, whose model weights are taken.
        module: The module to fill.
        optimizers: Its optimizers, over the mains; empty when not fitting.
        main: Its parameters.
        mesh: The groups of this rank.
        weights_only: As for ``torch.load``; None tries the safe way first.

    Communication: collective over all ranks.
    """
    if not is_sharded_checkpoint(path):
        return _load_file(path, optimizers, weights_only)
    metadata = load_metadata(path, weights_only)
    load_model(path, module, main, mesh, strict=module.strict_loading)
    saved = metadata.pop(_OPTIMIZERS, None)
    if optimizers:
        if saved is None:
            raise CheckpointMismatchError(
                f"a checkpoint to continue training from must hold optimizer states: {os.fspath(path)!r} was saved "
                "with "
                "save_weights_only=True. Load it with validate, test or predict, or continue from a full one."
            )
        for index, optimizer in enumerate(optimizers):
            load_optimizer(path, index, optimizer, main, mesh, saved[index])
        state = load_rank_state(path, mesh, weights_only)
        mesh.random.load_state_dict(state.values["random"])
        fit_loop = metadata.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" in fit_loop:
            if state.same_data:
                fit_loop["combined_loader"] = state.values["dataloaders"]
            else:
                # Another division of the data: no rank knows which samples it would have read.
                del fit_loop["combined_loader"]
    return metadata


def load_full_state_dict(
    checkpoint: Mapping[str, Any], module: LightningModule, main: MainParameters, mesh: ParallelMesh, strict: bool
) -> None:
    """Fill this rank's shards from the full tensors of a one-process or ``ddp`` checkpoint."""
    wanted, specs = model_tensors(module, main), model_placements(module, main)
    own = {f"{_PREFIX}{name}" for name in module.state_dict()}
    full = {
        f"{_PREFIX}{name}": tensor
        for name, tensor in checkpoint["state_dict"].items()
        # A shared parameter has an entry here for every name, and one main.
        if isinstance(tensor, Tensor) and not (f"{_PREFIX}{name}" in own and f"{_PREFIX}{name}" not in specs)
    }
    full = {name: _without_padding(tensor, specs.get(name)) for name, tensor in full.items()}
    copy_full_tensors(full, wanted, mesh, strict, _PREFIX, specs)
    main.publish()


def _without_padding(full: Tensor, spec: Placement | None) -> Tensor:
    """Cut the rows of a padded vocabulary off."""
    if not isinstance(spec, ShardSpec) or not spec.full_shape or full.dim() != len(spec.full_shape):
        return full
    size = spec.full_shape[spec.dim]
    return full.narrow(spec.dim, 0, size) if full.shape[spec.dim] > size else full


def _load_file(
    path: str | os.PathLike[str], optimizers: Sequence[Optimizer], weights_only: bool | None
) -> dict[str, Any]:
    if os.path.isdir(path) or not ("://" in os.fspath(path) or os.path.exists(path)):
        raise CheckpointMismatchError(
            "a checkpoint must be a directory that this strategy saved, or a file of another strategy: "
            f"{os.fspath(path)!r} is "
            "neither. A save that was interrupted leaves nothing. Check the path."
        )
    if optimizers:
        rank_zero_warn(
            f"{os.fspath(path)} was saved by another strategy: model weights, loops and schedulers are restored, but "
            "not the "
            "optimizer's states, which start empty."
        )
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only is True)
    return checkpoint
