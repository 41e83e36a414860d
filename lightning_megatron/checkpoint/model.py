"""The entries of a model: its parameters in full precision where they have it, and its persistent buffers."""

from __future__ import annotations

import os

from torch import Tensor, nn

from lightning_megatron.checkpoint.load import load_tensors
from lightning_megatron.checkpoint.matching import Match
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import ShardSpec, whole_spec
from lightning_megatron.training.main_parameters import MainParameters

STATE_DICT = "state_dict."


def model_tensors(module: nn.Module, main: MainParameters) -> dict[str, tuple[Tensor, ShardSpec]]:
    """List a model's tensors for saving and loading, under ``state_dict.`` and their names.

    Parameters are their mains, so that a checkpoint of half-precision training loads in full precision and back.
    Buffers that a state dict has are whole on every rank.

    Args:
        module: The module whose parameters ``main`` holds, under the same names.
        main: Its parameters.
    """
    entries = {f"{STATE_DICT}{name}": (main.main(name).detach(), main.spec(name)) for name in main.names}
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            entries[f"{STATE_DICT}{name}"] = (buffer.detach(), whole_spec(buffer))
    return entries


def load_model(
    path: str | os.PathLike[str], module: nn.Module, main: MainParameters, mesh: ParallelMesh, strict: bool = True
) -> Match:
    """Load a model's tensors from a checkpoint of any layout and precision, mains and half-precision parameters alike.

    Raises:
        CheckpointMismatchError: On all ranks, naming tensors and shapes.

    Communication: one gather of names over tp x pp.
    """
    found = load_tensors(path, model_tensors(module, main), mesh, strict, prefix=STATE_DICT)
    main.copy_to_model()
    return found
