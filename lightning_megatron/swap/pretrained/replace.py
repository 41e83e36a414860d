"""Replacement of whole Hugging Face models by a GPT or an Encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.init import initialize_
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.blocks.whole_model import is_cut
from lightning_megatron.swap.families import Family, find_family
from lightning_megatron.swap.families.bert import CLASSIFIER
from lightning_megatron.swap.hugging_face.encoder_model import HuggingFaceEncoder
from lightning_megatron.swap.hugging_face.family_layers import build_layers
from lightning_megatron.swap.hugging_face.generation import GeneratingLM
from lightning_megatron.swap.hugging_face.own_code import is_hugging_face
from lightning_megatron.swap.hugging_face.peft_layers import (
    adapter_of,
    add_adapter,
    remove_input_hooks,
)
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.hugging_face.tree import take_over
from lightning_megatron.swap.pretrained.deferred import DrawnTensors, Origin, Overlaid, origin_of
from lightning_megatron.swap.pretrained.from_pretrained import folder_of
from lightning_megatron.swap.pretrained.untouched import (
    built_parts,
    built_settings,
    check_settings,
    check_tie,
    check_untouched,
)
from lightning_megatron.swap.tensors.low_rank import without_adapters
from lightning_megatron.swap.tensors.mapping import named
from lightning_megatron.swap.weights.load import (
    RenamedTensors,
    check_tensors,
    fill,
    load_from,
    reader_of,
)
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder

#: Log text for a model whose weights were complete on every rank.
NOTE = (
    "Every rank held the full model first; from_pretrained or from_config in configure_model never "
    "holds more than this rank's part."
)


def family_of_module(module: nn.Module) -> Family | None:
    """Return the family of a replaceable Hugging Face model; None for other modules."""
    return find_family(type(module).__name__) if is_hugging_face(module) else None


def reason_to_keep(module: Any, family: Family) -> str:
    """Return the setting of a model that its family's table does not support; empty if none.

    Such a model is not replaced, because Hugging Face's own module supports every setting.
    """
    return family.refusal_of(module.config.to_dict())


def is_part(module: Any) -> bool:
    """Return whether a Hugging Face model has values but lacks its class's head.

    Such a model inside a larger Hugging Face model is not replaced, because the larger model reads
    its tensors and may share them.
    """
    return module.base_model is module and not any(
        parameter.is_meta for parameter in module.parameters()
    )


@dataclass(frozen=True)
class SwappedModel:
    """Layers that compute a Hugging Face model, and the step that installs them.

    Args:
        layers: Layers that compute, with their values.
        finish: Function that installs the layers in the model, in place.
        note: Text for the log.
    """

    layers: GPT | Encoder
    finish: Callable[[], None]
    note: str = ""


def swapped_model(
    name: str, source: Any, family: Family, mesh: ParallelMesh, shows_progress: bool = False
) -> SwappedModel:
    """Build this rank's part of a Hugging Face model, ready for installation.

    A model on the meta device gets the values of its folder. Without a folder it gets initial
    values that do not depend on the layout, and so does a head that the folder lacks.

    Args:
        name: Name of the model, for errors.
        source: Model.
        family: Family of the model.
        mesh: Process groups of this rank.
        shows_progress: Whether rank 0 may show a progress bar while it reads a folder.

    Raises:
        UnsupportedError: If no model of this package supports the settings, or if only some of the
            parameters that form one parameter are frozen.
        ParallelPlanError: If the layout does not fit the sizes of the model.
        CheckpointMismatchError: If the model has other tensors than its family.
    """
    adapter = adapter_of(name, source, family)
    tensors = without_adapters(source.state_dict())
    origin = origin_of(source)
    check_untouched(name, source, built_parts(source) if origin is None else origin.parts)
    settings = built_settings(source)
    if origin is not None:
        check_settings(name, family, origin.config, settings)
    remove_input_hooks(source)
    has_pooler = getattr(source, "pooler", None) is not None
    settings |= _labels(settings, family, tensors)
    model = build_layers(settings, family, source.dtype, mesh, has_pooler=has_pooler)
    check_tie(name, source, is_tied=model.config.tie_embeddings)
    had_values = not any(tensor.is_meta for tensor in tensors.values())
    folder = folder_of(source)
    note = NOTE if had_values and is_cut(mesh) else ""
    if had_values:
        load_from(model, tensors, family)
    else:
        # The check of the folder would not notice values that user code set in a model without
        # weights.
        own = reader_of(tensors, family)
        check_tensors(own, family.tensors(model.config), family, model.config.tie_embeddings)
        given = own.only(name for name, tensor in tensors.items() if not tensor.is_meta)
        if folder is None:
            initialize_(model, mesh.device, torch.initial_seed())
            _fill_given(model, origin, family, own, given)
        else:
            files = reader_of(SafetensorsFolder(folder), family)
            reader = Overlaid(given, files) if given.own else files
            missing = load_from(model, reader, family, torch.initial_seed(), shows_progress)
            note = (
                f"{named(missing)} are not in {folder} and keep their first values."
                if missing
                else note
            )
        if given.own:
            count = f"{len(given.own)} tensors" if len(given.own) > 4 else named(given.own)
            note = f"{count} have the values that configure_model gave them. {note}".strip()
    if any(getattr(part, "gradient_checkpointing", False) for part in source.modules()):
        model.recompute = "full"
    if adapter is not None:
        add_adapter(name, model, source, family, adapter)
    kind: type[ReplacedModel] = HuggingFaceEncoder if isinstance(model, Encoder) else GeneratingLM
    return SwappedModel(model, lambda: take_over(name, source, model, family, adapter, kind), note)


def _labels(
    settings: Mapping[str, Any], family: Family, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return settings for the classifier's number of labels; the classifier may be new."""
    for tensor in family.tensors(family.config(settings)):
        name = tensor.sources[0].name
        if tensor.target == CLASSIFIER and name in tensors:
            count = len(tensors[name])
            return {
                "num_labels": count,
                "id2label": {number: str(number) for number in range(count)},
            }
    return {}


def _fill_given(
    model: GPT | Encoder,
    origin: Origin | None,
    family: Family,
    own: RenamedTensors,
    given: RenamedTensors,
) -> None:
    """Fill parameters with values that user code changed in a model with initial weights."""
    changed = set(given.names())
    table = [
        tensor
        for tensor in family.tensors(model.config)
        if not changed.isdisjoint(tensor.source_shapes)
    ]
    if not table or origin is None:
        return
    # Draw again the tensors that one layer joins with them.
    beside = {name: own.shape(name) for tensor in table for name in tensor.source_shapes}
    fill(
        model,
        {tensor.target: tensor for tensor in table},
        Overlaid(given, DrawnTensors(origin, beside)),
        family,
    )
