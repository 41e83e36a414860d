"""State dicts of modules around Hugging Face models, as those are before and after they are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families import Family, family_of
from lightning_megatron.swap.families.expert_names import is_of_training
from lightning_megatron.swap.load import full_tensors
from lightning_megatron.swap.low_rank import Adapter, full_factors, without_adapters
from lightning_megatron.swap.packed import pack
from lightning_megatron.swap.replaced import replaced_models


def to_own_names(module: nn.Module, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which the tensors of replaced models are those of their parameters here.

    The names of most are the same; some tensors are stored otherwise, or are several.

    Args:
        module: The module, whose Hugging Face models have been replaced.
        full: Full tensors as the models had them before; others are passed on.

    Raises:
        CheckpointMismatchError: If tensors of a model are missing, left over or of another shape.
    """
    found = dict(full)
    for name, part in replaced_models(module):
        prefix, config = f"{name}." if name else "", part.body.config
        foreign = {key.removeprefix(prefix): found.pop(key) for key in full if key.startswith(prefix)}
        if not foreign:
            continue
        dtype, table = next(iter(foreign.values())).dtype, part.family.at_home(config)
        adapter = part.adapter
        for target, tensor in full_tensors(without_adapters(foreign), part.family, config, dtype, table):
            found[f"{prefix}{_in_tree(target, adapter)}"] = tensor
        for target, tensor in full_factors(foreign, adapter, table):
            found[f"{prefix}{target}"] = tensor
        own = dict(part.named_buffers())
        # What other strategies do not have keeps its value.
        found |= {f"{prefix}{key}": buffer for key, buffer in own.items() if is_of_training(key)}
        _add_aliases(found, prefix, part.family, config, adapter)
    return found


def refuse_foreign_states(module: nn.Module) -> None:
    """Refuse to continue an optimizer of replaced models from another strategy's file.

    Raises:
        UnsupportedError: If there is one.
    """
    replaced = [name for name, _ in replaced_models(module)]
    if replaced:
        raise UnsupportedError(
            f"a training of a replaced Hugging Face model ({', '.join(replaced)}) cannot continue from another "
            "strategy's file: its optimizer numbers the parameters that the model had before. Save the weights with "
            "save_pretrained and build the model from that folder, or continue with the strategy that saved."
        )


def to_foreign_names(models: Mapping[str, Mapping[str, Any]], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict in which replaced models have the tensors that they had before.

    Args:
        models: Class and configuration of each model, by its name in the module.
        state: Full tensors by the names of this package; those of vocabularies may have rows of padding.
    """
    found = dict(state)
    for name, model in models.items():
        prefix, family = f"{name}." if name else "", family_of(model["architecture"])
        config, adapter = family.config(model["config"]), _adapter_of(model)
        theirs: dict[str, Tensor] = {}
        table = family.at_home(config)
        for tensor in table:
            key = f"{prefix}{_in_tree(tensor.target, adapter)}"
            if key not in found and family.is_head(tensor.sources[0].name):
                continue  # the model was built without its head
            theirs |= tensor.split(found.pop(key)[: tensor.shape[0]])
        found |= {f"{prefix}{_in_tree(key, adapter)}": part for key, part in pack(theirs, family.packed).items()}
        for one in () if adapter is None else adapter.maps_at_home(table):
            for factor in (one.a, one.b):
                own = factor.split(found.pop(f"{prefix}{factor.target}"))
                assert adapter is not None, "there are factors of adapters alone"
                found |= {f"{prefix}{adapter.own_name(key)}": part for key, part in own.items()}
        for key in [key for key in found if key.startswith(prefix) and is_of_training(key)]:
            del found[key]
        _add_aliases(found, prefix, family, config, adapter)
    return found


def _adapter_of(model: Mapping[str, Any]) -> Adapter | None:
    adapter = Adapter(**model["adapter"]) if "adapter" in model else None
    if adapter is not None and adapter.saved:
        raise UnsupportedError(
            f"modules that peft trains as a whole cannot be written as one file: {', '.join(adapter.saved)}. It keeps "
            "them as they were before, too, and that is gone. Write the adapter or the merged model with "
            "`lightning-megatron convert`."
        )
    return adapter


def _in_tree(name: str, adapter: Adapter | None) -> str:
    return name if adapter is None else adapter.wrapped_name(name)


def _add_aliases(found: dict[str, Any], prefix: str, family: Family, config: Any, adapter: Adapter | None) -> None:
    """Give the tensors that have two names the second one, too."""
    aliases = dict(family.copies)
    if config.tie_embeddings:
        aliases[family.head] = family.embedding
    for alias, name in aliases.items():
        own = f"{prefix}{_in_tree(name, adapter)}"
        if own in found:
            found[f"{prefix}{_in_tree(alias, adapter)}"] = found[own]
