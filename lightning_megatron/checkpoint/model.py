"""Entries of a model: its main parameters in full precision, and its persistent buffers."""

from __future__ import annotations

from torch import nn

from lightning_megatron.checkpoint.entries import Entry
from lightning_megatron.checkpoint.load import Match, load_tensors
from lightning_megatron.checkpoint.metadata_checks import MODEL
from lightning_megatron.checkpoint.open_checkpoint import Source
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import Placement, replicated_spec
from lightning_megatron.optimizer.main_parameters import MainParameters


def model_tensors(module: nn.Module, main: MainParameters) -> dict[str, Entry]:
    """Return the entries of this rank's parameters and buffers, with the prefix ``state_dict.``.

    The entry of a trained parameter is its main parameter, so that a checkpoint of half-precision
    training has full precision. If the main parameter is divided among the data-parallel ranks, the
    entry is this rank's slice. Every rank has persistent buffers in full.
    """
    entries = {}
    trained = set(main.trained)
    for name in main.names:
        rank_slice = main.slices.get(name)
        if rank_slice is not None:
            entries[f"{MODEL}{name}"] = Entry(
                rank_slice.main.detach(), rank_slice.placement, rank_slice.is_exclusive
            )
        elif name not in trained:
            entries[f"{MODEL}{name}"] = Entry(main.parameter(name).detach(), main.spec(name))
    return entries | _buffers(module)


def model_placements(module: nn.Module, main: MainParameters) -> dict[str, Placement]:
    """Return the placements of all parameters and buffers of this rank's pipeline stage.

    The names are those of :func:`model_tensors`. Slices of other data-parallel ranks are included.
    """
    placements: dict[str, Placement] = {f"{MODEL}{name}": main.spec(name) for name in main.names}
    return placements | {name: entry.placement for name, entry in _buffers(module).items()}


def load_model(
    source: Source,
    module: nn.Module,
    main: MainParameters,
    mesh: ParallelMesh,
    strict: bool = True,
) -> Match:
    """Load the main parameters, half-precision parameters and buffers of a model.

    Raises:
        CheckpointMismatchError: On all ranks, with names and shapes.

    Communication: one gather of names over tp x pp, and one of the parameters over the data axis.
    """
    expected = model_placements(module, main)
    matched = load_tensors(source, model_tensors(module, main), mesh, strict, MODEL, expected)
    main.publish()
    return matched


def _buffers(module: nn.Module) -> dict[str, Entry]:
    persistent = module.state_dict(keep_vars=True).keys()
    return {
        f"{MODEL}{name}": Entry(buffer.detach(), replicated_spec(buffer), changes_in_forward=True)
        for name, buffer in module.named_buffers()
        if name in persistent
    }
