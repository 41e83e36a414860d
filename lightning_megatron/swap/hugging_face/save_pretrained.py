"""Saving of a Hugging Face model that is sharded over ranks."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.errors import CheckpointMismatchError, RankMismatchError, UnsupportedError
from lightning_megatron.groups.axis import MeshAxis
from lightning_megatron.groups.collectives import all_gather_objects
from lightning_megatron.groups.mesh import ParallelMesh, ranks_on_cpu
from lightning_megatron.groups.pending import start_transfers
from lightning_megatron.groups.shard_spec import Box, shard_spec_of
from lightning_megatron.layers.parameters.eight_bit_parameter import EightBitWeight
from lightning_megatron.models.stage import PipelinedModule, computed_by
from lightning_megatron.swap.families.layer_names import is_training_only
from lightning_megatron.swap.hugging_face.own_code import (
    holds_replaced,
    names_in_files,
    plain_config,
)
from lightning_megatron.swap.hugging_face.peft_layers import is_peft_module
from lightning_megatron.swap.tensors.low_rank import plain_name
from lightning_megatron.swap.tensors.mapping import named
from lightning_megatron.swap.weights.export import MAX_FILE_BYTES, export_as_it_is, export_folder
from lightning_megatron.swap.weights.file_format import FileFormat, block

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_folder(
    model: Any, folder: str | os.PathLike[str], max_shard_size: int | str | None = None
) -> None:
    """Write a model's configuration and full weights as a folder for ``from_pretrained``.

    Rank 0 writes, and the other ranks send their parts of one tensor at a time. No rank ever has
    more than one full tensor in addition to its part of the model. Weights have the dtype of the
    model's parameters.

    Communication: one gather of names, then one message for each part of a tensor, over all ranks
    on the CPU.
    """
    if model.adapter is not None:
        raise UnsupportedError(
            f"save_pretrained writes models without adapters: {type(model).__name__} has "
            f"{model.adapter.name!r}. Its class has no tensors of an adapter. Save a checkpoint, "
            "and write the adapter, or the merged model, with `lightning-megatron convert`."
        )
    model.body.wait_for_parameters()
    tensors = {
        model.family.present_name(plain_name(path)): tensor
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
        if not is_training_only(path)
    }
    limit = _limit(max_shard_size)

    def write(full: Iterator[tuple[str, Tensor]]) -> None:
        export_folder(full, model.family, model.config.to_dict(), folder, limit)
        _write_generation(model, folder)

    write_together(tensors, model.mesh, write)


def save_as_it_is(
    model: Any,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str | None = None,
    **others: Any,
) -> None:
    """Write a Hugging Face model that runs its own code; all ranks must call this.

    The files equal those of Hugging Face's method for the same weights. If every rank has the full
    model, Hugging Face's method runs.

    Communication: that of :func:`save_folder` if ranks have parts, none otherwise.
    """
    mesh = mesh_of(model)
    if mesh is None:
        size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        type(model).save_pretrained(model, save_directory, **size, **others)
        return
    check_arguments(others)
    if holds_replaced(model):
        parts = [name for name, part in model.named_modules() if computed_by(part) is not None]
        raise UnsupportedError(
            f"save_pretrained cannot write a model with replaced parts: {type(model).__name__} "
            f"holds {named(parts)}, which compute with layers of this package and store other "
            "tensors than their class. Call save_pretrained of each, or write a file for one "
            "process with `lightning-megatron checkpoint consolidate`."
        )
    if any(is_peft_module(part) for part in model.modules()):
        raise UnsupportedError(
            "save_pretrained writes models without adapters: peft has wrapped layers of this "
            f"{type(model).__name__}, and ranks hold parts of it. Call save_pretrained of the "
            "PeftModel on all ranks, or save a checkpoint, which holds all tensors by name."
        )
    for part in model.modules():
        if isinstance(part, PipelinedModule):
            part.wait_for_parameters()
    limit = _limit(max_shard_size)

    def write(full: Iterator[tuple[str, Tensor]]) -> None:
        form = FileFormat.of(model)
        kind = type(model).__name__
        export_as_it_is(full, form, plain_config(model), kind, save_directory, limit)
        _write_generation(model, save_directory)

    write_together(_tensors_of_class(model), mesh, write)


def _write_generation(model: Any, folder: str | os.PathLike[str]) -> None:
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def mesh_of(model: nn.Module) -> ParallelMesh | None:
    """Return the process groups over which a model is sharded; None if it is not sharded."""
    meshes = (getattr(part, "mesh", None) for part in model.modules())
    return next((mesh for mesh in meshes if isinstance(mesh, ParallelMesh)), None)


def _tensors_of_class(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors on this rank by their names in files."""
    state = model.state_dict(keep_vars=True)
    names = names_in_files(model, {name: id(tensor) for name, tensor in state.items()})
    return {name: state[name] for name in names}


def write_together(
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    write: Callable[[Iterator[tuple[str, Tensor]]], None],
) -> None:
    """Gather full tensors from all ranks and write them on rank 0.

    Args:
        write: Function that writes the full tensors of an iterator of names and tensors.

    Raises:
        CheckpointMismatchError: On all ranks, if ``write`` raises it on rank 0.
        UnsupportedError: On all ranks, if ``write`` raises it on rank 0, or for weights that a fit
            stores in 8 bits.
        OSError: On all ranks, if ``write`` raises it on rank 0.

    Communication: one gather of names, one message for each part of a tensor, and one gather of
    the outcome, over all ranks on the CPU.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, EightBitWeight):
            raise UnsupportedError(
                "save_pretrained writes weights in the precision of the run: fp8.parameters keeps "
                f"{name!r} in 8 bits during the fit. Call it after the fit, or save a checkpoint, "
                "which has full precision, and convert it with `lightning-megatron convert`."
            )
    views = _sent_views(tensors, mesh)
    with _all_ranks(mesh) as world:
        offers = {
            name: _Offer(tensors[name].dtype, shard_spec_of(tensors[name]).full_shape, tuple(parts))
            for name, parts in views.items()
        }
        all_offers = all_gather_objects(offers, world)
        names = sorted({name for offers in all_offers for name in offers}, key=block)
        failure: Exception | None = None
        if world.rank != 0:
            for name in names:
                for view in views.get(name, {}).values():
                    start_transfers([(_as_bytes(view), 0)], [], world).wait()
        else:
            full = ((name, _gathered(name, views, all_offers, world)) for name in names)
            try:
                write(full)
            except (CheckpointMismatchError, UnsupportedError, OSError) as error:
                failure = error
                deque(full, maxlen=0)  # the other ranks send all tensors before they get the error
        failure = all_gather_objects(failure, world)[0]
    if failure is not None:
        raise failure


@contextmanager
def _all_ranks(mesh: ParallelMesh) -> Iterator[MeshAxis]:
    try:
        with ranks_on_cpu(mesh) as world:
            yield world
    except RankMismatchError as error:
        raise UnsupportedError(
            "save_pretrained of a model that is cut over ranks must be called on all ranks, "
            f"because each sends its part to rank 0: {error} Call it outside of `if "
            "trainer.is_global_zero:`, in on_train_end or after the fit, or write a folder from a "
            "checkpoint with `lightning-megatron convert`."
        ) from error


@dataclass(frozen=True)
class _Offer:
    """Parts of a tensor that a rank sends, with the full tensor's dtype and shape (elements)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def _sent_views(tensors: Mapping[str, Tensor], mesh: ParallelMesh) -> dict[str, dict[Box, Tensor]]:
    """List the parts of tensors that this rank sends, by name; one rank sends each copy."""
    sent = {}
    for name, tensor in tensors.items():
        spec = shard_spec_of(tensor, mesh.tp.rank)
        if spec.tied_to is not None or not mesh.replica_axis(spec.is_expert).is_first:
            continue
        views = {box: view for box, view in spec.local_views(tensor.detach()) if box.copy == 0}
        if views:
            sent[name] = views
    return sent


def _gathered(
    name: str,
    views: Mapping[str, Mapping[Box, Tensor]],
    all_offers: Sequence[Mapping[str, _Offer]],
    world: MeshAxis,
) -> Tensor:
    first = next(offers[name] for offers in all_offers if name in offers)
    full = torch.empty(first.shape, dtype=first.dtype)
    for rank, offers in enumerate(all_offers):
        for box in offers[name].boxes if name in offers else ():
            slices = (slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            region = full[tuple(slices)]
            if rank == world.rank:
                region.copy_(views[name][box])
                continue
            arrived = torch.empty(box.sizes, dtype=first.dtype)
            start_transfers([], [(_as_bytes(arrived), rank)], world).wait()
            region.copy_(arrived)
    return full


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _limit(size: int | str | None) -> int:
    if size is None or isinstance(size, int):
        return MAX_FILE_BYTES if size is None else size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)", size.strip().upper())
    if match is not None:
        return int(float(match[1]) * _UNITS[match[2]])
    raise UnsupportedError(
        f"max_shard_size must be a number of bytes or a text such as '5GB': {size!r}. Use one of "
        f"the units {', '.join(_UNITS)}."
    )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse unsupported arguments of ``save_pretrained``.

    ``is_main_process`` may have any value, because rank 0 always writes.
    """
    allowed: dict[str, Any] = {
        "safe_serialization": True,
        "save_peft_format": True,
        "save_original_format": True,
        "save_embedding_layers": "auto",
    }
    refused = [
        name
        for name, value in arguments.items()
        if value is not None and name != "is_main_process" and value != allowed.get(name, False)
    ]
    if refused:
        raise UnsupportedError(
            f"save_pretrained of a model that is cut over ranks takes no {', '.join(refused)}, "
            "because rank 0 writes the safetensors files for all ranks. Leave it out."
        )
