"""Conversion of state dicts between replaced models and their Hugging Face classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families import Family
from lightning_megatron.swap.families.layer_names import is_training_only
from lightning_megatron.swap.hugging_face.class_tensors import ClassTensors, class_name_in, owner_of
from lightning_megatron.swap.hugging_face.replaced_model import replaced_models
from lightning_megatron.swap.tensors.low_rank import Adapter, full_factors, without_adapters
from lightning_megatron.swap.weights.load import full_tensors


def to_package_names(module: nn.Module, full: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the tensors of replaced models in a state dict to this package's names.

    Most tensors keep their names. Some are stored differently or are joined from several tensors.

    Args:
        full: Full tensors, by the names before the replacement. Tensors outside of replaced models
            are returned unchanged.
    """
    renamed = dict(full)
    for name, part in replaced_models(module):
        prefix = f"{name}." if name else ""
        config = part.body.config
        foreign = {
            key.removeprefix(prefix): renamed.pop(key) for key in full if key.startswith(prefix)
        }
        if not foreign:
            continue
        dtype = next(iter(foreign.values())).dtype
        table = part.family.class_tensors(config)
        adapter = part.adapter
        for target, tensor in full_tensors(
            without_adapters(foreign), part.family, config, dtype, table
        ):
            renamed[f"{prefix}{_in_tree(target, adapter)}"] = tensor
        for target, tensor in full_factors(foreign, adapter, table):
            renamed[f"{prefix}{target}"] = tensor
        buffers = dict(part.named_buffers())
        # Other strategies do not save these tensors, so the module keeps its values.
        renamed |= {
            f"{prefix}{key}": buffer for key, buffer in buffers.items() if is_training_only(key)
        }
        _add_aliases(renamed, prefix, part.family, config, adapter)
    return renamed


def to_class_names(
    models: Sequence[ClassTensors], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert replaced models' tensors in a state dict to the names and order of their classes.

    Args:
        state: Full tensors, by this package's names. Vocabularies may have padding rows.
    """
    parts: dict[str, list[str]] = {}
    for name in state:
        if not any(name.startswith(model.prefix) and is_training_only(name) for model in models):
            parts.setdefault(class_name_in(models, name), []).append(name)
    renamed: dict[str, Tensor] = {}
    for name, members in parts.items():
        model = owner_of(models, members[0])
        renamed[name] = (
            state[name]
            if model is None
            else model.join({member: state[member] for member in members})
        )
    for model in models:
        _refuse_saved_modules(model.adapter)
        _add_aliases(renamed, model.prefix, model.family, model.config, model.adapter)
    return renamed


def _refuse_saved_modules(adapter: Adapter | None) -> None:
    if adapter is not None and adapter.saved:
        raise UnsupportedError(
            "modules that peft trains as a whole cannot be written as one file: "
            f"{', '.join(adapter.saved)}. peft also stores their original weights, which are not "
            "kept here. Write the adapter or the merged model with `lightning-megatron convert`."
        )


def _in_tree(name: str, adapter: Adapter | None) -> str:
    return name if adapter is None else adapter.wrapped_name(name)


def _add_aliases(
    tensors: dict[str, Any], prefix: str, family: Family, config: Any, adapter: Adapter | None
) -> None:
    """Add each tensor with two names under the second name, too."""
    aliases = dict(family.copies)
    if config.tie_embeddings:
        aliases[family.head] = family.embedding
    for alias, name in aliases.items():
        original = f"{prefix}{_in_tree(name, adapter)}"
        if original in tensors:
            tensors[f"{prefix}{_in_tree(alias, adapter)}"] = tensors[original]
