"""Search for Hugging Face models that compute with this package's layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_megatron.swap.hugging_face.replaced_model import ReplacedModel


def replaced_models(module: nn.Module) -> Iterator[tuple[str, ReplacedModel]]:
    """List the Hugging Face models that compute with this package's layers, by name."""
    for name, part in module.named_modules():
        if isinstance(part, ReplacedModel):
            yield name, part
