"""Qwen2-MoE: experts next to a shared MLP with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.swap.families.experts import (
    EXPERT_NAMES,
    MLP,
    PACKED_EXPERTS,
    PARTS,
    balanced,
    sparse_layers,
)
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.field_kinds import Number
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    FIXED,
    HEAD_DIM,
    OUTDATED,
    sizes,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields


def _windows(values: Values) -> Mapping[str, Any]:
    if not values["use_sliding_window"]:
        return {}
    types = values["layer_types"]
    if types is None:
        most = values["max_window_layers"]
        types = [
            "full_attention" if layer % 2 or layer >= most else "sliding_attention"
            for layer in range(values["num_hidden_layers"])
        ]
    return windows_of(types, values["sliding_window"], values, "Qwen2-MoE")


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    ConfigTable(
        "Qwen2-MoE",
        (
            *sizes(151936, 2048, 5632, 24, 16, 32768, 16),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            Field("qkv_bias", True, "qkv_bias"),
            Field("use_sliding_window", False),
            # Files of models without windows have 0.
            Field("sliding_window", 4096, kind=Number | None),
            Field("max_window_layers", 28, kind=Number),
            Field("layer_types", None, _windows),
        ),
        FIXED,
        parts={
            "experts": ConfigTable(
                "Qwen2-MoE",
                (
                    Field("num_hidden_layers", 24),
                    Field("num_experts", 60, "num_experts"),
                    Field("num_experts_per_tok", 4, "top_k"),
                    Field("moe_intermediate_size", 1408, "ffn_hidden_size"),
                    Field("shared_expert_intermediate_size", 5632, "shared_ffn_hidden_size"),
                    Field("norm_topk_prob", False, "normalize_top_k"),
                    Field("decoder_sparse_step", 1, sparse_layers),
                    Field("mlp_only_layers", None),
                    *balanced(sparse_layers),
                ),
                {"scoring": "softmax", "shared_gate": True},
                build=ExpertsConfig,
            )
        },
    ),
    replace(
        LLAMA_NAMES,
        experts=replace(
            EXPERT_NAMES,
            shared_up=tuple(f"{MLP}.shared_expert.{part}" for part in PARTS[:2]),
            shared_down=f"{MLP}.shared_expert.{PARTS[2]}",
            shared_gate=f"{MLP}.shared_expert_gate",
        ),
    ),
    ignored=OUTDATED,
    packed=PACKED_EXPERTS,
)
