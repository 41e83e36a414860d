"""Granite: Llama with factors of embeddings, scores, residual additions and logits."""

from __future__ import annotations

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    ATTENTION_BIAS,
    FIXED,
    HEAD_DIM,
    OUTDATED,
    sizes,
)
from lightning_megatron.swap.families.rotary import rotary_fields

GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    ConfigTable(
        "Granite",
        (
            *sizes(32000, 4096, 11008, 32, 32, 2048),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
            Field("mlp_bias", False, "mlp_bias"),
            Field("embedding_multiplier", 1.0, "embedding_scale"),
            Field("attention_multiplier", 1.0, "attention_scale"),
            Field("residual_multiplier", 1.0, "residual_scale"),
            Field(
                "logits_scaling", 1.0, lambda values: {"logit_scale": 1 / values["logits_scaling"]}
            ),
        ),
        {**FIXED, "scales_vectors": True},
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)
