"""The models that have taken the place of Hugging Face's, and where their layers are in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from torch import nn

from lightning_megatron.models.encoder_config import EncoderConfig
from lightning_megatron.swap.encoder_model import HuggingFaceEncoder
from lightning_megatron.swap.families import ModelConfig
from lightning_megatron.swap.language_model import HuggingFaceLM

Replaced: TypeAlias = HuggingFaceLM | HuggingFaceEncoder
"""A model of ours behind Hugging Face's call."""


def replaced_models(module: nn.Module) -> Iterator[tuple[str, Replaced]]:
    """List the models inside a module that have replaced one of Hugging Face, with their names."""
    for name, part in module.named_modules():
        if isinstance(part, (HuggingFaceLM, HuggingFaceEncoder)):
            yield name, part


def config_of(model: Replaced) -> ModelConfig:
    """Return our configuration of a model."""
    return model.gpt.config if isinstance(model, HuggingFaceLM) else model.encoder.config


def layers_name(config: ModelConfig) -> str:
    """Return what the names of the layers begin with in a model that has replaced another, with its dot."""
    return "encoder." if isinstance(config, EncoderConfig) else "gpt."
