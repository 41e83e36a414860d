"""OLMo 2 and 3 and OLMoE: norms of all heads of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.swap.families.experts import (
    EXPERT_NAMES,
    PACKED_EXPERTS,
    all_layers,
    balanced,
)
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

_NORMED = {**FIXED, "qk_norm": True, "qk_norm_over": "layer"}
_FIXED = {**_NORMED, "norm_position": "output"}
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
    return windows_of(types, values["sliding_window"], values, "OLMo 3", keeps_all=True)


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

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    ConfigTable(
        "OLMoE",
        (
            *sizes(50304, 2048, 2048, 16, 16, 4096, norm_eps=1e-5, padding=1),
            *rotary_fields(),
            ACTIVATION,
            ATTENTION_BIAS,
            Field(
                "clip_qkv", None, allowed=(None,), reason="queries, keys and values have no bounds"
            ),
        ),
        _NORMED,
        parts={
            "experts": ConfigTable(
                "OLMoE",
                (
                    Field("num_hidden_layers", 16),
                    Field("num_experts", 64, "num_experts", aliases=("num_local_experts",)),
                    Field("num_experts_per_tok", 8, "top_k"),
                    Field("intermediate_size", 2048, "ffn_hidden_size"),
                    Field("norm_topk_prob", False, "normalize_top_k"),
                    *balanced(all_layers),
                ),
                {"scoring": "softmax"},
                build=ExpertsConfig,
            )
        },
    ),
    replace(LLAMA_NAMES, experts=EXPERT_NAMES),
    ignored=OUTDATED,
    packed=PACKED_EXPERTS,
)
