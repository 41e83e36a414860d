"""Support for ``WeightAveraging`` callbacks, with averages in full precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_megatron.checkpoint import model_placements, model_tensors
from lightning_megatron.checkpoint.consolidate import CURRENT
from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.load import load_stored
from lightning_megatron.checkpoint.model import STATE_DICT
from lightning_megatron.checkpoint.open_checkpoint import OpenCheckpoint
from lightning_megatron.groups.collectives import all_reduce_
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import FlatSlice, replicated_spec
from lightning_megatron.strategy.checkpoints.saved_weights import first_names
from lightning_megatron.strategy.optimization.parameter_data import memory_of
from lightning_megatron.strategy.private.callback_patches import (
    patch_averaging,
    restore_averaging,
)
from lightning_megatron.training.main_parameters import MainParameters


def averaging_callback(trainer: Trainer) -> WeightAveraging | None:
    """Return the callback that averages weights; None without one."""
    callbacks = (
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging)
    )
    return next(callbacks, None)


def load_averages(
    stored: OpenCheckpoint,
    metadata: dict[str, Any],
    module: LightningModule,
    main: MainParameters,
    mesh: Any,
) -> None:
    """Load averages into the callback and current weights into the model.

    Args:
        stored: Sharded checkpoint. The model must already have loaded its ``state_dict``, which
            contains the averages if they were saved.
        metadata: Checkpoint that the callback receives; this function sets ``state_dict`` and
            ``current_model_state``.
        module: Module that is trained.
        main: Main parameters of the module.
        mesh: Process groups of this rank.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: that of ``load_model``.
    """
    state = module.state_dict()
    saved = stored.tensors
    entries: dict[str, Entry] = {}
    names = first_names(state)
    for name, first in names.items():
        if name == first and f"{STATE_DICT}{name}" in saved:
            average = state[name].detach().to(saved[f"{STATE_DICT}{name}"].dtype, copy=True)
            spec = main.spec(name) if main.holds(name) else replicated_spec(average)
            entries[f"{STATE_DICT}{name}"] = Entry(average, spec)
    load_stored(stored, entries, mesh, strict=False, prefix=STATE_DICT)
    metadata["state_dict"] = {
        name: entries[f"{STATE_DICT}{names[name]}"].tensor
        if f"{STATE_DICT}{names.get(name)}" in entries
        else value
        for name, value in state.items()
    }
    if any(name.startswith(CURRENT) for name in saved):
        current = {_current(name): entry for name, entry in model_tensors(module, main).items()}
        expected = {_current(name): place for name, place in model_placements(module, main).items()}
        load_stored(stored, current, mesh, module.strict_loading, CURRENT, expected)
        main.publish()
        # The model already has the current weights: the callback copies them onto themselves.
        metadata["current_model_state"] = module.state_dict()


def current_weights(weights: dict[str, Entry]) -> dict[str, Entry]:
    """Return a model's entries under the names used next to its averages."""
    return {_current(name): entry for name, entry in weights.items()}


def _current(name: str) -> str:
    return f"{CURRENT}{name.removeprefix(STATE_DICT)}"


def average_main_parameters(
    trainer: Trainer, module: LightningModule, main: MainParameters, mesh: ParallelMesh
) -> None:
    """Let the callback average main parameters if the model has half-precision parameters.

    Args:
        trainer: Trainer whose averaging callback is changed, if it has one.
        module: Module that is trained.
        main: Main parameters of the module.
        mesh: Process groups of this rank.
    """
    callback = averaging_callback(trainer)
    if callback is not None and any(
        main.main(name).dtype != main.parameter(name).dtype for name in main.trained
    ):
        patch_averaging(callback, _FullMainParameters(module, main, mesh), _AverageSwap())


def average_model_parameters(trainer: Trainer) -> None:
    """Undo :func:`average_main_parameters`."""
    callback = averaging_callback(trainer)
    if callback is not None:
        restore_averaging(callback)


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
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in self._main.trained:
            by_dtype.setdefault(self._main.main(name).dtype, []).append(name)
        gathered: dict[str, Tensor] = {}
        for dtype, names in by_dtype.items():
            parameters = [self._main.parameter(name) for name in names]
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
            for name, parameter, part in zip(names, parameters, flat.split(sizes), strict=True):
                self._write_local(name, part)
                gathered[name] = part.view(parameter.shape)
            # Exactly one rank writes each element and the others have zeros, so the sum is exact.
            all_reduce_(flat, self._mesh.data)
        return gathered

    def _write_local(self, name: str, flat: Tensor) -> None:
        main_slice = self._main.slices.get(name)
        if main_slice is None or not (main_slice.is_exclusive or self._mesh.data.is_first):
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
