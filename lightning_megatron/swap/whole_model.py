"""Replace a GPT that was built whole by this rank's part of it."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.groups.shard_spec import shard_spec_of
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import PipelinedModule

#: What the log says about a model that was built whole.
NOTE = (
    "Every rank held the full model first; GPT(config, mesh=self.device_mesh) in configure_model never builds more "
    "than "
    "this rank's part."
)


def is_foreign(module: nn.Module, mesh: ParallelMesh) -> bool:
    """Tell whether a module is a pipelined model that was not built on ``mesh``."""
    return isinstance(module, PipelinedModule) and module.mesh is not mesh


def sharded_gpt(name: str, source: nn.Module, mesh: ParallelMesh) -> GPT:
    """Return this rank's layers and shards of a whole GPT, with its values.

    The result also draws its dropout from the streams of ``mesh``, which is why a replicated model is rebuilt as well.
    A model on the meta device gives a part on the meta device.

    Args:
        name: Name of the model, for errors.
        source: A GPT built without a mesh.
        mesh: The groups of this rank.

    Raises:
        UnsupportedError: For a model that is already cut, is not exactly a GPT, or whose parameters have been changed.
        ParallelPlanError: If the layout cannot hold the model.
    """
    if not _is_gpt(source) or source.mesh.layout.world_size > 1:
        raise UnsupportedError(
            f"{name!r} ({type(source).__name__}) must be built on this mesh or be a GPT built without one, because "
            "only the "
            "latter can be cut afterwards. Build it with mesh=self.device_mesh in configure_model."
        )
    with torch.device("meta"):
        target, expected = type(source)(source.config, mesh), type(source)(source.config)
    _check_names(name, source, expected)
    for path, owner in target.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[key] = _part(source, f"{path}.{key}", parameter, mesh.device)
    target.recompute = source.recompute
    return target.train(source.training)


def _is_gpt(source: nn.Module) -> TypeGuard[GPT]:
    """Tell whether a model has the parts of a GPT and no others, so that its config says all."""
    return isinstance(source, GPT) and type(source).__init__ is GPT.__init__ and type(source)._build is GPT._build


def _check_names(name: str, source: GPT, expected: GPT) -> None:
    wanted = {key for key, _ in expected.named_parameters()}
    found = {key for key, _ in source.named_parameters()}
    if wanted != found:
        raise UnsupportedError(
            f"the GPT {name!r} has other parameters than its config says ({sorted(wanted ^ found)[0]!r}), so it "
            "cannot be cut "
            "after building. Build it with mesh=self.device_mesh in configure_model and change it there."
        )


def _part(source: GPT, name: str, parameter: Tensor, device: torch.device) -> nn.Parameter:
    """Cut the values of one target parameter out of the whole model."""
    spec = shard_spec_of(parameter)
    whole = source.get_parameter(spec.tied_to or name)
    # The padding of the whole model's vocabulary belongs to no full tensor and has another size here.
    full = whole.detach().narrow(spec.dim, 0, spec.full_shape[spec.dim])
    local = spec.shard(full, local_size=parameter.shape[spec.dim])
    result = nn.Parameter(local if local.is_meta else local.to(device), requires_grad=whole.requires_grad)
    result.__dict__.update(parameter.__dict__)
    return result
