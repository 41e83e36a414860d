"""The models that have taken the place of Hugging Face's, and where their layers are in them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.swap.adapter import ReplacedModel
from lightning_megatron.swap.families import ModelConfig


def replaced_models(module: nn.Module) -> Iterator[tuple[str, ReplacedModel]]:
    """List the models inside a module that have replaced one of Hugging Face, with their names."""
    for name, part in module.named_modules():
        if isinstance(part, ReplacedModel):
            yield name, part


def layers_name(config: ModelConfig) -> str:
    """Return what the names of the layers begin with in a model that has replaced another, with its dot."""
    return "encoder." if isinstance(config, EncoderConfig) else "gpt."
