"""Replacement of Hugging Face models by a GPT or an Encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.layers.parameters.init import initialize_
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.models.gpt import GPT
from lightning_megatron.swap.blocks.whole_model import is_cut
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.families.bert import CLASSIFIER
from lightning_megatron.swap.hugging_face.encoder_model import HuggingFaceEncoder
from lightning_megatron.swap.hugging_face.generation import GeneratingLM
from lightning_megatron.swap.hugging_face.peft_layers import (
    adapter_of,
    remove_input_hooks,
    updates_of,
)
from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel
from lightning_megatron.swap.hugging_face.tree import install_layers
from lightning_megatron.swap.pretrained.deferred import (
    DrawnTensors,
    Origin,
    OverlayReader,
    origin_of,
)
from lightning_megatron.swap.pretrained.from_pretrained import folder_of
from lightning_megatron.swap.pretrained.unchanged_models import (
    built_settings,
    check_settings,
    check_tie,
    check_untouched,
    describe_built,
)
from lightning_megatron.swap.pretrained.without_weights import build_layers
from lightning_megatron.swap.tensors.low_rank import without_adapters
from lightning_megatron.swap.tensors.mapping import named
from lightning_megatron.swap.weights.load import (
    RenamedTensors,
    WeightLoading,
    check_tensors,
    plan_loading,
    reader_of,
)
from lightning_megatron.swap.weights.load import fill as fill_from
from lightning_megatron.swap.weights.safetensors_folder import SafetensorsFolder

#: Log text for a model whose full weights were on every rank.
NOTE = (
    "Every rank held the full model first; from_pretrained or from_config in configure_model never "
    "holds more than this rank's part."
)


@dataclass(frozen=True)
class SwappedModel:
    """Layers that compute a Hugging Face model, and the steps that fill and install them.

    Args:
        fill: Function that fills the layers with values, and returns a text for the log.
        install: Function that puts the layers into the model, in place.
    """

    layers: GPT | Encoder
    fill: Callable[[], str]
    install: Callable[[], None]


def build_swapped_model(
    name: str, source: Any, family: Family, mesh: ParallelMesh, shows_progress: bool = False
) -> SwappedModel:
    """Build this rank's part of a Hugging Face model, without values; do not change the model.

    The names and shapes of the model's tensors are checked. The values of a model on the meta
    device come from its folder. Without a folder, or for a head that the folder lacks, they are
    initial values, which do not depend on the layout.
    """
    adapter = adapter_of(name, source, family)
    tensors = without_adapters(source.state_dict())
    origin = origin_of(source)
    check_untouched(name, source, describe_built(source) if origin is None else origin.parts)
    settings = built_settings(source)
    if origin is not None:
        check_settings(name, family, origin.config, settings)
    has_pooler = getattr(source, "pooler", None) is not None
    settings |= _labels(settings, family, tensors)
    model = build_layers(settings, family, source.dtype, mesh, has_pooler=has_pooler)
    check_tie(name, source, is_tied=model.config.tie_embeddings)
    if any(getattr(part, "gradient_checkpointing", False) for part in source.modules()):
        model.recompute = "full"
    load: Callable[[], str]
    if any(tensor.is_meta for tensor in tensors.values()):
        load = _loading_without_weights(source, model, family, tensors, origin, shows_progress)
    else:
        load = partial(_copy, plan_loading(model, tensors, family), NOTE if is_cut(mesh) else "")
    updates = [] if adapter is None else updates_of(name, model, source, family, adapter)

    def fill() -> str:
        note = load()
        for add in updates:
            add()
        return note

    def install() -> None:
        remove_input_hooks(source)
        kind: type[ReplacedModel] = (
            HuggingFaceEncoder if isinstance(model, Encoder) else GeneratingLM
        )
        install_layers(name, source, model, family, adapter, kind)

    return SwappedModel(model, fill, install)


def _loading_without_weights(
    source: Any,
    model: GPT | Encoder,
    family: Family,
    tensors: Mapping[str, Tensor],
    origin: Origin | None,
    shows_progress: bool,
) -> Callable[[], str]:
    """Return a function that fills a model whose source has tensors without values."""
    rows_by_name = reader_of(tensors, family)
    # The check of the folder would not notice values that user code set in a model without weights.
    check_tensors(rows_by_name, family.tensors(model.config), family, model.config.tie_embeddings)
    with_values = rows_by_name.only(key for key, tensor in tensors.items() if not tensor.is_meta)
    folder = folder_of(source)
    if folder is None:
        return partial(_draw, model, origin, family, rows_by_name, with_values)
    return _reading(model, family, folder, with_values, shows_progress)


def _copy(loading: WeightLoading, note: str) -> str:
    """Fill a model with the values of a complete model."""
    loading.run()
    return note


def _reading(
    model: GPT | Encoder, family: Family, folder: str, weights: RenamedTensors, shows_progress: bool
) -> Callable[[], str]:
    """Return a function that fills a model with values of a folder, or those set by user code."""
    files = reader_of(SafetensorsFolder(folder), family)
    loading = plan_loading(
        model,
        OverlayReader(weights, files) if weights.rows_by_name else files,
        family,
        may_lack=True,
    )

    def fill() -> str:
        loading.run(torch.initial_seed(), shows_progress)
        note = ""
        if loading.missing:
            note = f"{named(loading.missing)} are not in {folder} and keep their initial values."
        return _with_weights_note(note, weights)

    return fill


def _draw(
    model: GPT | Encoder,
    origin: Origin | None,
    family: Family,
    drawn: RenamedTensors,
    weights: RenamedTensors,
) -> str:
    """Fill a model with initial values, except for tensors that user code has changed."""
    initialize_(model, model.mesh.device, torch.initial_seed())
    changed = set(weights.names())
    table = [
        tensor
        for tensor in family.tensors(model.config)
        if not changed.isdisjoint(tensor.source_shapes)
    ]
    if table and origin is not None:
        # If a layer joins several tensors, and user code changed only some, draw the others again.
        shapes = {name: drawn.shape(name) for tensor in table for name in tensor.source_shapes}
        fill_from(
            model,
            {tensor.target: tensor for tensor in table},
            OverlayReader(weights, DrawnTensors(origin, shapes)),
            family,
        )
    return _with_weights_note("", weights)


def _with_weights_note(note: str, weights: RenamedTensors) -> str:
    if not weights.rows_by_name:
        return note
    count = (
        f"{len(weights.rows_by_name)} tensors"
        if len(weights.rows_by_name) > 4
        else named(weights.rows_by_name)
    )
    return f"{count} keep the values from configure_model. {note}".strip()


def _labels(
    settings: Mapping[str, Any], family: Family, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return settings with the number of labels of the classifier, which may be a new one."""
    for tensor in family.tensors(family.config(settings)):
        name = tensor.sources[0].name
        if tensor.target == CLASSIFIER and name in tensors:
            count = len(tensors[name])
            return {
                "num_labels": count,
                "id2label": {number: str(number) for number in range(count)},
            }
    return {}
