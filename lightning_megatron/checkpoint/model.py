"""The entries of a model: its parameters in full precision where they have it, and its persistent buffers."""

from __future__ import annotations

import os

from torch import nn

from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.load import load_tensors
from lightning_megatron.checkpoint.matching import Match
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement, whole_spec
from lightning_megatron.training.main_parameters import MainParameters

STATE_DICT = "state_dict."


def model_tensors(module: nn.Module, main: MainParameters) -> dict[str, Entry]:
    """List what this rank holds of a model for saving and loading, under ``state_dict.`` and the names.

    Parameters are their mains, so that a checkpoint of half-precision training loads in full precision and back; of
    those that the data ranks train in parts, this rank's part. Buffers that a state dict has are whole on every rank.

    Args:
        module: The module whose parameters ``main`` holds, under the same names.
        main: Its parameters.
    """
    entries, trained = {}, set(main.trained)
    for name in main.names:
        one = main.slices.get(name)
        if one is not None:
            entries[f"{STATE_DICT}{name}"] = Entry(one.main.detach(), one.placement, one.is_exclusive)
        elif name not in trained:
            entries[f"{STATE_DICT}{name}"] = Entry(main.parameter(name).detach(), main.spec(name))
    return entries | _buffers(module)


def model_placements(module: nn.Module, main: MainParameters) -> dict[str, Placement]:
    """List where everything that this rank's stage has of a model lies in the full tensors, by the same names."""
    placements: dict[str, Placement] = {f"{STATE_DICT}{name}": main.spec(name) for name in main.names}
    return placements | {name: entry.placement for name, entry in _buffers(module).items()}


def load_model(
    path: str | os.PathLike[str], module: nn.Module, main: MainParameters, mesh: ParallelMesh, strict: bool = True
) -> Match:
    """Load a model's tensors from a checkpoint of any layout and precision, mains and half-precision parameters alike.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: one gather of names over tp x pp, and one of the parameters over the data axis.
    """
    expected = model_placements(module, main)
    found = load_tensors(path, model_tensors(module, main), mesh, strict, STATE_DICT, expected)
    main.publish()
    return found


def _buffers(module: nn.Module) -> dict[str, Entry]:
    persistent = module.state_dict(keep_vars=True).keys()
    return {
        f"{STATE_DICT}{name}": Entry(buffer.detach(), whole_spec(buffer), changes_in_forward=True)
        for name, buffer in module.named_buffers()
        if name in persistent
    }
