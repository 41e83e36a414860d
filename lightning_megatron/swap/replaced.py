"""Hugging Face models that compute with layers of this package."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_megatron.swap.adapter import ReplacedModel


def replaced_models(module: nn.Module) -> Iterator[tuple[str, ReplacedModel]]:
    """List the Hugging Face models inside a module that compute with layers of this package, by name."""
    for name, part in module.named_modules():
        if isinstance(part, ReplacedModel):
            yield name, part
