"""Replace the causal language models of Hugging Face, whole, by a GPT behind their own call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.families import Family, find_family
from lightning_megatron.swap.generation import generating
from lightning_megatron.swap.language_model import HuggingFaceLM, LabelledGPT
from lightning_megatron.swap.load import load_from
from lightning_megatron.swap.mapping import TensorReader, TensorsInMemory
from lightning_megatron.swap.pretrained import folder_of
from lightning_megatron.swap.safetensors_folder import SafetensorsFolder

#: What the log says about a model whose weights every rank held.
NOTE = (
    "Every rank held the full model first; from_pretrained or from_config in configure_model never holds more than "
    "this rank's part."
)


def family_of_module(module: nn.Module) -> Family | None:
    """Return the family of a Hugging Face model that can be replaced; None for every other module."""
    if not type(module).__module__.startswith("transformers.") or not hasattr(module, "can_generate"):
        return None
    return find_family(type(module).__name__)


def language_model(name: str, source: Any, family: Family, mesh: ParallelMesh) -> HuggingFaceLM:
    """Return this rank's part of a Hugging Face model.

    A model without values (on the meta device) gets those of its folder, or new ones that do not depend on the layout.

    Args:
        name: Name of the model, for errors.
        source: The model.
        family: Its family.
        mesh: The groups of this rank.

    Raises:
        UnsupportedError: For settings that no GPT has, or parameters that are partly frozen.
        ParallelPlanError: If the layout cannot hold the model.
        CheckpointMismatchError: If the model has other tensors than its family.
    """
    config = family.config(source.config.to_dict())
    before = torch.get_default_dtype()
    torch.set_default_dtype(source.dtype)
    try:
        with torch.device("meta"):
            gpt = LabelledGPT(config, mesh)
    finally:
        torch.set_default_dtype(before)
    reader = _values(source)
    if reader is None:
        initialize_(gpt, mesh.device, torch.initial_seed())
    else:
        load_from(gpt, reader, family)
    _freeze(name, gpt, source, family)
    if any(getattr(part, "gradient_checkpointing", False) for part in source.modules()):
        gpt.recompute = "full"
    return generating(HuggingFaceLM(gpt, source.config, family), source).train(source.training)


def _values(source: nn.Module) -> TensorReader | None:
    if not any(parameter.is_meta for parameter in source.parameters()):
        return TensorsInMemory(source.state_dict())
    folder = folder_of(source)
    return None if folder is None else SafetensorsFolder(folder)


def _freeze(name: str, gpt: GPT, source: nn.Module, family: Family) -> None:
    """Train what was trained."""
    trained = {key: parameter.requires_grad for key, parameter in source.named_parameters(remove_duplicate=False)}
    own = dict(gpt.named_parameters())
    for tensor in family.tensors(gpt.config):
        if tensor.target in own:
            kinds = {trained[one.name] for one in tensor.sources if one.name in trained}
            if len(kinds) > 1:
                raise UnsupportedError(
                    f"parameters that become one must all be trained or all be frozen: "
                    f"{', '.join(one.name for one in tensor.sources)} of {name!r} are not. They become "
                    f"{tensor.target}. Freeze all of them or none."
                )
            own[tensor.target].requires_grad_(kinds.pop() if kinds else True)
