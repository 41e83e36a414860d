"""Comparison of the user's module between ranks, before any rank shards or trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.experts.layer import MixtureOfExperts
from lightning_megatron.groups.fingerprint import check_same_everywhere
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.stage import PipelinedModule, named_layers
from lightning_megatron.nest import children, leaves

_Setting: TypeAlias = str | int | float | None
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_PACKAGE = __name__.partition(".")[0]
_REMEDY = (
    "Build the same module on every rank: its sizes and settings must not depend on the rank, the "
    "host or random numbers without a seed."
)


def hyperparameter_fields(module: LightningModule) -> dict[str, str]:
    """Return the plain values of ``module.hparams``, which must be equal on all ranks, by name."""
    return {name: repr(value) for name, value in _settings(dict(module.hparams), "hparams")}


def check_same_module(module: LightningModule, mesh: ParallelMesh, *, is_new: bool) -> None:
    """Refuse a module whose parameters, buffers or layers differ between ranks.

    Names, full shapes and dtypes are compared, whether parameters are trained, and the settings of
    submodules: configurations, and public attributes that are numbers, strings, functions, tuples
    or dataclasses. Neither values of weights are compared nor attributes of the LightningModule
    itself, where users keep times, paths and ranks.

    Args:
        module: User's module, before this run shards it.
        is_new: Whether no run of this strategy has used the module. Steps may have changed settings
            on some ranks only.

    Communication: two all-reduces of digests over the world on the CPU.
    """
    world = mesh.world_cpu
    parts = dict(module.named_modules())
    configurations = dict(_configurations(parts)) if is_new else {}
    check_same_everywhere(world, configurations, _REMEDY)
    fields = dict(_tensors(module))
    if is_new:
        fields.update(_layer_settings(parts))
    # A model that was built for the mesh has other layers in each stage.
    stage = mesh.pp.rank if _is_cut(module) else 0
    check_same_everywhere(world, fields, _REMEDY, part=stage, num_parts=mesh.pp.size)


def _is_cut(module: nn.Module) -> bool:
    meshes = (vars(part).get("mesh") for _, part in named_layers(module))
    return any(isinstance(mesh, ParallelMesh) and mesh.layout.world_size > 1 for mesh in meshes)


def _tensors(module: nn.Module) -> Iterator[tuple[str, _Setting]]:
    """Yield the forms of parameters, in full, and of buffers that no model of this package has."""
    for name, parameter in module.named_parameters():
        spec = shard_spec_of(parameter)
        if not spec.is_expert:
            trained = "" if parameter.requires_grad else ", frozen"
            yield name, f"{spec.full_shape}, {parameter.dtype}{trained}"
    for prefix, part in module.named_modules():
        if not _is_of_package(part):
            for name, buffer in part.named_buffers(prefix, recurse=False):
                yield name, f"{tuple(buffer.shape)}, {buffer.dtype}"


def _configurations(parts: dict[str, nn.Module]) -> Iterator[tuple[str, _Setting]]:
    """Yield the settings of models' configurations, each of which many layers may share."""
    seen: set[int] = set()
    for name, part in parts.items():
        config = vars(part).get("config")
        # The layers of a model of this package differ between stages.
        is_layer = _is_of_package(part) and not isinstance(part, PipelinedModule)
        if config is None or is_layer or id(config) in seen:
            continue
        seen.add(id(config))
        content = config.to_dict() if hasattr(config, "to_dict") else config
        if isinstance(content, Mapping):
            # An entry that begins with "_" is no setting, but the path of the file, for example.
            content = {key: value for key, value in content.items() if not str(key).startswith("_")}
        yield from _settings(content, f"{name}.config".lstrip("."))


def _layer_settings(parts: dict[str, nn.Module]) -> Iterator[tuple[str, _Setting]]:
    """Yield the classes and settings of all submodules."""
    mixtures = tuple(
        f"{name}." for name, part in parts.items() if isinstance(part, MixtureOfExperts)
    )
    for name, part in parts.items():
        # Each rank of ep has its own experts.
        if not name or name.startswith(mixtures):
            continue
        yield f"type of {name}", type(part).__qualname__
        for attribute, value in vars(part).items():
            # Libraries keep identities of objects in private attributes. Integers of a sharded
            # layer, such as its first feature, may depend on its rank.
            is_private = attribute.startswith("_")
            is_same = isinstance(value, (float, *_FUNCTIONS)) or not _is_of_package(part)
            if is_same and not is_private:
                yield from _settings(value, f"{name}.{attribute}", containers=(tuple,))


def _is_of_package(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == _PACKAGE


def _settings(
    value: Any, path: str, containers: tuple[type, ...] = (object,)
) -> Iterator[tuple[str, _Setting]]:
    """Yield the plain values in a nest by their paths."""
    is_record = is_dataclass(value) and not _is_of_package(value)
    is_nest = children(value) is not None
    if is_nest and not (is_record or isinstance(value, containers)):
        return
    for name, leaf in leaves(value, path):
        if isinstance(leaf, _FUNCTIONS):
            yield name, leaf.__qualname__
        elif isinstance(leaf, (Enum, torch.dtype)):
            yield name, str(leaf)
        elif leaf is None or isinstance(leaf, (str, int, float)):
            yield name, leaf
