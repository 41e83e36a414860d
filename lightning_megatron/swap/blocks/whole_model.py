"""Replacement of a GPT or an Encoder that was built in full, by this rank's part of it."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import PipelinedModule

_Whole: TypeAlias = GPT | Encoder

#: Log text for a model that was built in full.
NOTE = (
    "Every rank held the full model first; GPT(config, mesh=self.device_mesh) in configure_model "
    "never builds more than this rank's part."
)


def is_foreign(module: nn.Module, mesh: ParallelMesh) -> bool:
    """Return whether a module is a pipelined model that was not built on ``mesh``."""
    return isinstance(module, PipelinedModule) and module.mesh is not mesh


def is_cut(mesh: ParallelMesh) -> bool:
    """Return whether a layout shards a model, so that no rank has the full model."""
    return mesh.tp.size * mesh.pp.size * mesh.ep.size * mesh.etp.size > 1


def build_model(name: str, source: nn.Module, mesh: ParallelMesh) -> _Whole:
    """Build this rank's layers of a full model on the meta device; do not change the source.

    A replicated model is rebuilt as well, because dropout must use the random streams of ``mesh``.
    """
    if not _is_standard(source) or source.mesh.layout.world_size > 1:
        raise UnsupportedError(
            f"{name!r} ({type(source).__name__}) must be built on this mesh, or be a GPT or an "
            "Encoder built without a mesh, because only these can be cut later. Build it with "
            "mesh=self.device_mesh in configure_model."
        )
    with torch.device("meta"):
        kind: Any = type(source)
        target = kind(source.config, mesh)
        expected = kind(source.config)
    _check_names(name, source, expected)
    target.recompute = source.recompute
    if isinstance(source, GPT):
        target.loss_chunk = source.loss_chunk
    return target.train(source.training)


def fill_model(target: nn.Module, source: Any, device: torch.device) -> None:
    """Fill layers of :func:`build_model` with this rank's shards of the model's values.

    Layers of a model on the meta device stay there.
    """
    for path, owner in target.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[key] = _part(source, f"{path}.{key}", parameter, device)
    for name, buffer in target.named_buffers():
        # The biases that balance experts are such buffers, for example.
        buffer.copy_(source.get_buffer(name))


def _is_standard(source: nn.Module) -> TypeGuard[_Whole]:
    """Return whether a model has only modules that its config describes."""
    source_class: Any = type(source)
    return any(
        isinstance(source, kind)
        and source_class.__init__ is kind.__init__
        and source_class._build is kind._build
        for kind in (GPT, Encoder)
    )


def _check_names(name: str, source: _Whole, expected: _Whole) -> None:
    expected_names = {key for key, _ in expected.named_parameters()}
    present = {key for key, _ in source.named_parameters()}
    if expected_names != present:
        raise UnsupportedError(
            f"the model {name!r} cannot be cut after building, because its parameters differ from "
            f"those of its config ({sorted(expected_names ^ present)[0]!r}). Build it with "
            "mesh=self.device_mesh in configure_model and change it there."
        )


def _part(source: _Whole, name: str, parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Return this rank's values of a target parameter, cut from those of the full model."""
    spec = shard_spec_of(parameter)
    whole = source.get_parameter(spec.tied_to or name)
    # Remove the padding of the vocabulary, which is not part of the full tensor, and has another
    # size in the target.
    full = whole.detach().narrow(spec.dim, 0, spec.full_shape[spec.dim])
    local = spec.shard(full, local_size=parameter.shape[spec.dim])
    result = nn.Parameter(
        local if local.is_meta else local.to(device), requires_grad=whole.requires_grad
    )
    result.__dict__.update(parameter.__dict__)
    return result
