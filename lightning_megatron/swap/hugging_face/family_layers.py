"""Construction of this package's layers for a model of a known family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.models.encoder import Encoder
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.hugging_face.causal_lm import LabelledGPT


def build_layers(
    config: Mapping[str, Any],
    family: Family,
    dtype: torch.dtype,
    mesh: ParallelMesh | None = None,
    *,
    has_pooler: bool = True,
) -> LabelledGPT | Encoder:
    """Build this rank's part of a model on the meta device.

    Args:
        config: Configuration of the Hugging Face model.
        family: Family of the model.
        dtype: Dtype of the weights.
        mesh: Process groups of this rank; None means a single process.
        has_pooler: Whether the encoder has a pooler, if its class makes one optional. The
            configuration does not contain this choice.

    Raises:
        UnsupportedError: If no model of this package supports the settings.
        ParallelPlanError: If the layout does not fit the sizes of the model.
    """
    settings = family.config(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            if isinstance(settings, GPTConfig):
                return LabelledGPT(settings, mesh)
            has_head = settings.head != "pooler" or has_pooler
            return Encoder(settings if has_head else replace(settings, head="none"), mesh)
    finally:
        torch.set_default_dtype(before)
