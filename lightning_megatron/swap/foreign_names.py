"""State dicts of modules around Hugging Face models, as those are before and after they are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families import family_of
from lightning_megatron.swap.families.expert_names import is_of_training
from lightning_megatron.swap.load import full_tensors
from lightning_megatron.swap.low_rank import Adapter, full_factors, without_adapters
from lightning_megatron.swap.mapping import TensorMap
from lightning_megatron.swap.packed import pack
from lightning_megatron.swap.replaced import layers_name, replaced_models


def to_own_names(module: nn.Module, full: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which the tensors of replaced models are those of their layers here.

    Args:
        module: The module, whose Hugging Face models have been replaced.
        full: Full tensors by the names that the module had before; others are passed on.

    Raises:
        CheckpointMismatchError: If tensors of a model are missing, left over or of another shape.
    """
    found = dict(full)
    for name, part in replaced_models(module):
        prefix, config = f"{name}." if name else "", part.body.config
        layers = f"{prefix}{layers_name(config)}"
        foreign = {
            key.removeprefix(prefix): found.pop(key)
            for key in full
            if key.startswith(prefix) and not key.startswith(layers)
        }
        if foreign:
            dtype = next(iter(foreign.values())).dtype
            own = full_tensors(without_adapters(foreign), part.family, config, dtype)
            found |= {f"{layers}{target}": tensor for target, tensor in own}
            factors = full_factors(foreign, part.adapter, part.family.tensors(config))
            found |= {f"{layers}{target}": tensor for target, tensor in factors}
            # What other strategies do not have keeps its value.
            found |= {f"{layers}{key}": buffer for key, buffer in part.body.named_buffers() if is_of_training(key)}
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
        config = family.config(model["config"])
        layers = f"{prefix}{layers_name(config)}"
        theirs: dict[str, Tensor] = {}
        for tensor in family.tensors(config):
            if f"{layers}{tensor.target}" not in found and family.is_head(tensor.sources[0].name):
                continue  # the model was built without its head
            own = found.pop(f"{layers}{tensor.target}")
            theirs |= tensor.split(own[: tensor.shape[0]])
        found |= {f"{prefix}{key}": part for key, part in pack(theirs, family.packed).items()}
        if "adapter" in model:
            found |= _wrapped(Adapter(**model["adapter"]), family.tensors(config), found, prefix, layers)
        for key in [key for key in found if key.startswith(layers) and is_of_training(key)]:
            del found[key]
        found.pop(f"{layers}head.weight", None)
        if config.tie_embeddings:
            found[f"{prefix}{family.head}"] = found[f"{prefix}{family.embedding}"]
        found |= {f"{prefix}{copy}": found[f"{prefix}{first}"] for copy, first in family.copies}
    return found


def _wrapped(
    adapter: Adapter, table: Iterable[TensorMap], found: dict[str, Tensor], prefix: str, layers: str
) -> dict[str, Tensor]:
    """Take the tensors of adapted layers out of ``found`` and return them as the layers of peft have them."""
    if adapter.saved:
        raise UnsupportedError(
            f"modules that peft trains as a whole cannot be written as one file: {', '.join(adapter.saved)}. It keeps "
            "them as they were before, too, and that is gone. Write the adapter or the merged model with "
            "`lightning-megatron convert`."
        )
    inside: dict[str, Tensor] = {}
    for module in adapter.ranks:
        for name in (f"{module}.weight", f"{module}.bias"):
            if f"{prefix}{name}" in found:
                inside[f"{prefix}{adapter.wrapped_name(name)}"] = found.pop(f"{prefix}{name}")
    for factor in adapter.factors(table):
        own = factor.split(found.pop(f"{layers}{factor.target}"))
        inside |= {f"{prefix}{adapter.own_name(name)}": part for name, part in own.items()}
    return inside
