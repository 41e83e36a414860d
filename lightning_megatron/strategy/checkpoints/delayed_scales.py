"""Checkpoint entries of delayed scales for products in 8 bits: one history for each layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.load import load_tensors
from lightning_megatron.checkpoint.metadata_checks import SCALES
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import replicated_spec
from lightning_megatron.layers.fp8.delayed import DelayedScales
from lightning_megatron.models.layered import LayeredModule
from lightning_megatron.models.stage import pipelined_modules


def scale_tensors(module: LightningModule) -> dict[str, Entry]:
    """Return the checkpoint entries of this rank's histories; empty before the first step ends."""
    return {
        name: Entry(history, replicated_spec(history), changes_in_forward=True)
        for scales, names in _scales(module)
        if not scales.is_fresh
        for name, history in zip(names, scales.history, strict=True)
    }


def load_scales(stored: OpenCheckpoint, module: LightningModule, mesh: ParallelMesh) -> None:
    """Load histories from a checkpoint, which may lack them or have histories of other lengths.

    A longer history contributes its last steps. If the checkpoint has no history for some layer,
    all layers compute the scales of the first step from their current tensors.

    Communication: one gather of names over tp x pp, if there are such layers.
    """
    named_scales = list(_scales(module))
    if not named_scales:
        return
    read = {
        name: torch.zeros(_shape(stored, name, history), device=mesh.device)
        for scales, names in named_scales
        for name, history in zip(names, scales.history, strict=True)
    }
    entries = {name: Entry(history, replicated_spec(history)) for name, history in read.items()}
    missing = load_tensors(stored, entries, mesh, strict=False, prefix=SCALES).missing
    for scales, names in named_scales:
        scales.start_with([read[name] for name in names], is_complete=not missing)
    if missing:
        rank_zero_info(
            f"fp8: the checkpoint has no history of {len(missing)} layers: the first step has the "
            "scales of its own tensors."
        )


def _scales(module: LightningModule) -> Iterator[tuple[DelayedScales, list[str]]]:
    """Yield the delayed scales of each model, with the names of their checkpoint entries."""
    for prefix, model in pipelined_modules(module):
        if isinstance(model, LayeredModule) and model.delayed_scales is not None:
            scales = model.delayed_scales
            start = f"{SCALES}{prefix}." if prefix else SCALES
            yield scales, [f"{start}{name}" for name in scales.names]


def _shape(stored: OpenCheckpoint, name: str, current: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a saved history; that of ``current`` if the saved one does not fit."""
    saved = stored.tensors.get(name)
    shape = tuple(current.shape if saved is None else saved.shape)
    return shape if shape[1:] == current.shape[1:] else tuple(current.shape)
