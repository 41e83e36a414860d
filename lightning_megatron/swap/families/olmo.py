"""OLMo 2 and OLMo 3: norms of the sublayers' outputs, and of all heads of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    ATTENTION_BIAS,
    FIXED,
    HEAD_DIM,
    OUTDATED,
    sizes,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields, typed_rotary_fields

_FIXED = {**FIXED, "norm_position": "output", "qk_norm": True, "qk_norm_over": "layer"}
_NAMES = replace(
    LLAMA_NAMES,
    attention_norm="",
    mlp_norm="",
    attention_output_norm="model.layers.{}.post_attention_layernorm",
    mlp_output_norm="model.layers.{}.post_feedforward_layernorm",
)


def _three_of_four(values: Values) -> Mapping[str, Any]:
    types = values["layer_types"]
    if types is None:
        types = [
            "sliding_attention" if (layer + 1) % 4 else "full_attention"
            for layer in range(values["num_hidden_layers"])
        ]
    return windows_of(types, values["sliding_window"], values, "OLMo 3")


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    ConfigTable(
        "OLMo 2",
        (
            *sizes(50304, 4096, 11008, 32, 32, 2048, norm_eps=1e-5, padding=1),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
        ),
        _FIXED,
    ),
    _NAMES,
    ignored=OUTDATED,
)

OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    ConfigTable(
        "OLMo 3",
        (
            *sizes(50304, 4096, 11008, 32, 32, 2048, norm_eps=1e-5, padding=1),
            *typed_rotary_fields(500000.0, _three_of_four, window_base=500000.0),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
            Field("sliding_window", 4096),
            Field("layer_types", None, _three_of_four),
        ),
        _FIXED,
    ),
    _NAMES,
    ignored=OUTDATED,
)
