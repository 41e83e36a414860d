"""Replacement of Hugging Face models by a GPT or an Encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatron.groups.mesh import ParallelMesh
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
from lightning_megatron.swap.pretrained.deferred import origin_of
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
    folder = None if origin is None else origin.folder
    load = _loading(model, family, tensors, folder, shows_progress)
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


def _loading(
    model: GPT | Encoder,
    family: Family,
    tensors: Mapping[str, Tensor],
    folder: str | None,
    shows_progress: bool,
) -> Callable[[], str]:
    """Return a function that fills a model, and returns a text for the log.

    Values come from the source's own tensors, else from its folder, else they are initial values.
    """
    own = reader_of(tensors, family)
    if not any(tensor.is_meta for tensor in tensors.values()):
        loading = plan_loading(model, own, family)
        note = NOTE if is_cut(model.mesh) else ""
    else:
        # The check of the folder would not notice values that user code set.
        check_tensors(own, family.tensors(model.config), family, model.config.tie_embeddings)
        given = {
            name: (reader, rows)
            for name, (reader, rows) in own.tensors.items()
            if not tensors[rows.name].is_meta
        }
        note = ""
        if folder is None:
            loading = WeightLoading(model, RenamedTensors(given), family)
        else:
            files = reader_of(SafetensorsFolder(folder), family).tensors
            values = RenamedTensors({**files, **given})
            loading = plan_loading(model, values, family, may_lack=True)
            if loading.missing:
                note = (
                    f"{named(loading.missing)} are not in {folder} and keep their initial values."
                )
        if given:
            count = f"{len(given)} tensors" if len(given) > 4 else named(given)
            note = f"{count} keep the values from configure_model. {note}".strip()

    def fill() -> str:
        loading.run(shows_progress)
        return note

    return fill


def _labels(
    settings: Mapping[str, Any], family: Family, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return settings with the number of labels of the classifier, which may be a new one."""
    for tensor in family.tensors(family.config(settings)):
        name = tensor.sources[0].name
        if tensor.target == CLASSIFIER and name in tensors:
            count = len(tensors[name])
            return {"id2label": {number: str(number) for number in range(count)}}
    return {}
