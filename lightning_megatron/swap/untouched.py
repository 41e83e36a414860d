"""Whether a Hugging Face model still is what its class builds, so that other layers can compute it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.low_rank import plain_name
from lightning_megatron.swap.peft_layers import is_of_peft

#: Attributes that say how a model is trained or called, or that follow from the shapes of its weights.
_FREE = frozenset(
    {"training", "gradient_checkpointing", "name_or_path", "num_embeddings", "out_features", "vocab_size"}
    | {"is_hf_initialized", "is_gradient_checkpointing", "weights_folder", "is_loaded_in_4bit", "is_loaded_in_8bit"}
)


@dataclass(frozen=True)
class Part:
    """Describe a module: its class, and what its attributes say in numbers and words."""

    kind: type[nn.Module]
    settings: Mapping[str, Any]


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Describe every module of a model, by name.

    Args:
        model: The model, as its class has built it.
    """
    return {name: Part(type(module), dict(_settings(module))) for name, module in model.named_modules()}


def built_parts(model: Any) -> dict[str, Part]:
    """Describe every module that the class of a model builds from its configuration.

    Args:
        model: The model, which may have been changed since.
    """
    with torch.device("meta"):
        return parts_of(type(model)(model.config))


def check_untouched(name: str, model: nn.Module, parts: Mapping[str, Part]) -> None:
    """Refuse a model with modules or settings that layers of this package would not compute with.

    Args:
        name: Name of the model, for errors.
        model: The model.
        parts: What its class builds.

    Raises:
        UnsupportedError: If a module was replaced by one of another class, computes by another function, or has other
            settings.
    """
    for path, module in model.named_modules():
        part = parts.get(plain_name(f"{path}.weight").removesuffix(".weight"))
        if is_of_peft(module) or part is None:
            continue
        where = f"{name}.{path}" if path else name
        if "forward" in vars(module):
            _refuse(f"{where!r} has another forward method", "Leave the method as it is")
        if not isinstance(module, part.kind):
            was = part.kind.__name__
            _refuse(f"{where!r} is a {type(module).__name__}, where the class builds a {was}", "Leave it as it is")
        for key, value in _settings(module):
            if key in part.settings and part.settings[key] != value:
                what = f"{key} of {where!r} is {value!r}, and was {part.settings[key]!r} when it was built"
                _refuse(what, "Give from_pretrained or the configuration that value")


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if isinstance(value, (bool, int, float, str)) and not key.startswith("_") and key not in _FREE:
            yield key, value


def _refuse(what: str, remedy: str) -> None:
    raise UnsupportedError(
        f"a Hugging Face model that is replaced must compute what its class does: {what}. The layers that take over "
        f"would not know of it, and training would go on with other numbers. {remedy}, or leave the model to its own "
        "code: tensor_parallel_plan={'model': 'replicate'}, with the name of the model."
    )
