"""Write a Hugging Face model that is cut over ranks as a folder, from all ranks together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.collectives import all_gather_objects, barrier
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.p2p import exchange
from lightning_megatron.groups.shard_spec import Box, shard_spec_of
from lightning_megatron.swap.export import MAX_FILE_BYTES, export_folder
from lightning_megatron.swap.families.expert_names import is_of_training
from lightning_megatron.swap.low_rank import plain_name

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_folder(model: Any, folder: str | os.PathLike[str], max_shard_size: int | str | None = None) -> None:
    """Write configuration and weights of the whole model such that ``from_pretrained`` gives the same tensors.

    Rank 0 writes; every other rank sends it what it holds, one tensor after the other, so that no rank ever has more
    than one full tensor beside its own part. Weights have the type of the model's parameters.

    Args:
        model: A ``ReplacedModel``; all ranks call this together.
        folder: Where to, on a file system of rank 0; it must not have weights yet.
        max_shard_size: A file ends before the tensor that would exceed this (bytes, or text such as "5GB").

    Raises:
        UnsupportedError: If the folder has weights, or the model has an adapter.

    Communication: one gather of names, then one message for each part of a tensor, over all ranks on the CPU.
    """
    if model.adapter is not None:
        raise UnsupportedError(
            f"save_pretrained writes models without adapters: {type(model).__name__} has {model.adapter.name!r}. Its "
            "tensors are not those of the class. Save a checkpoint, and write the adapter, or the merged model, with "
            "`lightning-megatron convert`."
        )
    mesh, config = model.mesh, model.body.config
    model.body.wait_for_parameters()
    held = _held(model)
    offers = {name: (one.dtype, [(box.offsets, box.sizes) for box in one.boxes]) for name, one in held.items()}
    everyone = all_gather_objects(offers, mesh.world_cpu)
    shapes = {tensor.target: tensor.shape for tensor in model.family.at_home(config)}
    names = [name for name in shapes if any(name in one for one in everyone)]
    if mesh.rank != 0:
        for name in names:
            _send(held.get(name), mesh)
    else:
        tensors = ((name, _gathered(name, shapes[name], held, everyone, mesh)) for name in names)
        limit = MAX_FILE_BYTES if max_shard_size is None else _in_bytes(max_shard_size)
        export_folder(tensors, model.family, model.config.to_dict(), folder, limit, at_home=True)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    barrier(mesh.world_cpu)


@dataclass(frozen=True)
class _Held:
    """Hold the parts of a tensor that this rank gives, and its type."""

    boxes: tuple[Box, ...]
    views: tuple[Tensor, ...]
    dtype: torch.dtype


def _held(model: Any) -> dict[str, _Held]:
    """List the parts of tensors that this rank gives, by the names of the class; every part is given by one rank."""
    mesh, found = model.mesh, {}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, tensor in tensors.items():
        spec, name = shard_spec_of(tensor, mesh.tp.rank), plain_name(path)
        if spec.tied_to is not None or is_of_training(name) or not mesh.copies(spec.is_expert).is_first:
            continue
        pairs = [(box, view) for box, view in spec.local_views(tensor.detach()) if box.copy == 0]
        if pairs:
            boxes, views = zip(*pairs, strict=True)
            found[model.family.present_name(name)] = _Held(boxes, views, tensor.dtype)
    return found


def _send(held: _Held | None, mesh: ParallelMesh) -> None:
    for view in () if held is None else held.views:
        exchange([(_as_bytes(view), 0)], [], mesh.world_cpu).wait()


def _gathered(
    name: str,
    shape: tuple[int, ...],
    held: Mapping[str, _Held],
    everyone: Sequence[Mapping[str, Any]],
    mesh: ParallelMesh,
) -> Tensor:
    dtype = next(offered[name][0] for offered in everyone if name in offered)
    full = torch.empty(shape, dtype=dtype)
    for rank, offered in enumerate(everyone):
        for number, (offsets, sizes) in enumerate(offered[name][1] if name in offered else ()):
            region = full[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
            if rank == mesh.rank:
                region.copy_(held[name].views[number])
                continue
            arrived = torch.empty(sizes, dtype=dtype)
            exchange([], [(_as_bytes(arrived), rank)], mesh.world_cpu).wait()
            region.copy_(arrived)
    return full


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _in_bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    text = size.strip().upper()
    for unit, factor in sorted(_UNITS.items(), key=lambda one: -len(one[0])):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(float(number) * factor)
    raise UnsupportedError(
        f"max_shard_size must be a number of bytes or a text such as '5GB': {size!r}. Files end before they exceed it. "
        f"Use one of the units {', '.join(_UNITS)}."
    )


def unsupported_arguments(given: Mapping[str, Any]) -> Iterator[str]:
    """List the arguments of Hugging Face's ``save_pretrained`` that ask for something that is not done here.

    Args:
        given: The arguments beside the folder and the size of files.
    """
    harmless = {"is_main_process": True, "safe_serialization": True, "save_peft_format": True, "push_to_hub": False}
    for name, value in given.items():
        if value is not None and harmless.get(name, value is False) != value:
            yield name
