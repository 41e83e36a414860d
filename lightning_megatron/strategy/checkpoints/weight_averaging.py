"""Support for ``WeightAveraging`` callbacks, with averages in full precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatron.checkpoint import model_placements, model_tensors
from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.load import load_tensors
from lightning_megatron.checkpoint.metadata_checks import CURRENT, MODEL
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import FlatSlice
from lightning_megatron.optimizer.main_parameters import MainParameters
from lightning_megatron.strategy.optimization.parameter_readers import memory_of
from lightning_megatron.strategy.private.callback_patches import (
    average_parts,
    averaging_callbacks,
    begin_averages,
    load_own_tensors,
    patch_averaging,
)


def load_current_weights(
    stored: OpenCheckpoint,
    metadata: dict[str, Any],
    module: LightningModule,
    main: MainParameters,
    mesh: ParallelMesh,
) -> None:
    """Load the weights that training continues from, if the checkpoint has them beside averages.

    Args:
        stored: Sharded checkpoint. The model must already have loaded its ``state_dict``, which
            contains the averages if they were saved.
        metadata: Checkpoint that the callback receives; this function sets ``current_model_state``.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: that of ``load_model``, and one all-reduce per dtype over the data ranks.
    """
    average_loaded_weights(module, main, mesh)
    if any(name.startswith(CURRENT) for name in stored.tensors):
        current = current_weights(model_tensors(module, main))
        expected = {_current(name): place for name, place in model_placements(module, main).items()}
        load_tensors(stored, current, mesh, module.strict_loading, CURRENT, expected)
        main.publish()
        metadata["current_model_state"] = module.state_dict()


def average_loaded_weights(
    module: LightningModule, main: MainParameters, mesh: ParallelMesh
) -> None:
    """Let averages begin at the weights that the module has loaded.

    Communication: one all-reduce per dtype over the data ranks.
    """
    for callback in averaging_callbacks(module.trainer):
        begin_averages(callback, _FullMainParameters(module, main, mesh))


def current_weights(weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return a model's entries under the names used next to its averages."""
    return {_current(name): entry for name, entry in weights.items()}


def _current(name: str) -> str:
    return f"{CURRENT}{name.removeprefix(MODEL)}"


def average_main_parameters(
    module: LightningModule, main: MainParameters, mesh: ParallelMesh, undo: ExitStack
) -> None:
    """Let callbacks average this rank's part of the model, and main parameters in half precision.

    Communication: one all-reduce per dtype over the data ranks.
    """
    source = _FullMainParameters(module, main, mesh)
    is_half = any(main.main(name).dtype != main.parameter(name).dtype for name in main.trained)
    for callback in averaging_callbacks(module.trainer):
        if mesh.model.size > 1 or mesh.ep.size > 1:
            average_parts(callback, module, source)
        if is_half:
            patch_averaging(callback, source, _AverageSwap(), undo)
        load_own_tensors(callback, undo)


class _FullMainParameters:
    """Module whose ``parameters`` are full main parameters."""

    def __init__(self, module: nn.Module, main: MainParameters, mesh: ParallelMesh) -> None:
        self._module = module
        self._main = main
        self._mesh = mesh

    def parameters(self) -> Iterator[Tensor]:
        """Return the full parameters of the module, in full precision where they are trained.

        Communication: one all-reduce per dtype over the data ranks.
        """
        full = {id(self._main.parameter(name)): name for name in self._main.trained}
        main_parameters = self._gathered()
        for parameter in self._module.parameters():
            yield main_parameters[full[id(parameter)]] if id(parameter) in full else parameter

    def buffers(self) -> Iterator[Tensor]:
        """Return the buffers of the module."""
        return self._module.buffers()

    def _gathered(self) -> dict[str, Tensor]:
        alike: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name in self._main.trained:
            key = self._main.main(name).dtype, self._main.spec(name).is_expert
            alike.setdefault(key, []).append(name)
        gathered: dict[str, Tensor] = {}
        for (dtype, is_expert), names in alike.items():
            axis = self._mesh.replica_axis(is_expert)
            parameters = [self._main.parameter(name) for name in names]
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
            for name, parameter, part in zip(names, parameters, flat.split(sizes), strict=True):
                self._write_local(name, part, is_first=axis.is_first)
                gathered[name] = part.view(parameter.shape)
            # Exactly one rank writes each element and the others have zeros, so the sum is exact.
            all_reduce_(flat, axis)
        return gathered

    def _write_local(self, name: str, flat: Tensor, *, is_first: bool) -> None:
        main_slice = self._main.slices.get(name)
        if main_slice is None or not (main_slice.is_exclusive or is_first):
            return
        place = main_slice.placement
        start, stop = (
            (place.start, place.stop) if isinstance(place, FlatSlice) else (0, flat.numel())
        )
        flat[start:stop].copy_(main_slice.main.detach().reshape(-1))


class _AverageSwap:
    """Swap of averages and weights, without rounding the averages."""

    def __init__(self) -> None:
        self._kept: list[Tensor] | None = None

    def __call__(self, module: nn.Module, average: nn.Module) -> None:
        # The first call applies the averages and keeps the weights, the second restores the
        # weights. The averages stay in ``average``; their copy in the model is rounded.
        kept = self._kept
        self._kept = None
        current = [*module.parameters(), *module.buffers()]
        if kept is None:
            kept = [*average.parameters(), *average.buffers()]
            self._kept = [memory_of(tensor).clone() for tensor in current]
        for tensor, value in zip(current, kept, strict=True):
            memory_of(tensor).copy_(value)
