"""Llama and families with its tensors: Mistral, Qwen2, Qwen3 and (fused) Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    ATTENTION_BIAS,
    FIXED,
    HEAD_DIM,
    OUTDATED,
    head_dim,
    sizes,
    window,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields

#: Tensor names of Llama, and of most later families.
LLAMA_NAMES = DecoderNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    attention_norm="model.layers.{}.input_layernorm",
    mlp_norm="model.layers.{}.post_attention_layernorm",
    qkv=tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    output="model.layers.{}.self_attn.o_proj",
    up=("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    down="model.layers.{}.mlp.down_proj",
    query_norm="model.layers.{}.self_attn.q_norm",
    key_norm="model.layers.{}.self_attn.k_norm",
)
FUSED_NAMES = replace(
    LLAMA_NAMES,
    qkv=("model.layers.{}.self_attn.qkv_proj",),
    up=("model.layers.{}.mlp.gate_up_proj",),
)


def _windowed_layers(values: Values) -> Mapping[str, Any]:
    types = values["layer_types"]
    num_layers = values["num_hidden_layers"]
    width = values["sliding_window"] if values["use_sliding_window"] else None
    if types is None:
        first = values["max_window_layers"]
        types = [
            "full_attention" if width is None or i < first else "sliding_attention"
            for i in range(num_layers)
        ]
    return windows_of(types, width, values, "Qwen")


_NO_BIAS = "the family has no such bias"
_QWEN_WINDOWS = (
    Field("use_sliding_window", False),
    Field("sliding_window", 4096),
    Field("max_window_layers", 28),
    Field("layer_types", None, _windowed_layers),
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    ConfigTable(
        "Llama",
        (
            *sizes(32000, 4096, 11008, 32, 32, 2048),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
            Field("mlp_bias", False, "mlp_bias"),
            Field(
                "rope_interleaved",
                False,
                allowed=(False, None),
                reason="rotary positions pair the two halves of a head, not neighbouring elements",
            ),
        ),
        FIXED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    ConfigTable(
        "Mistral",
        (
            *sizes(32000, 4096, 14336, 32, 32, 131072, 8),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            Field("sliding_window", 4096, window),
        ),
        FIXED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ConfigTable(
        "Qwen2",
        (
            *sizes(151936, 4096, 22016, 32, 32, 32768, 32),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            *_QWEN_WINDOWS,
        ),
        {**FIXED, "qkv_bias": True},
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    ConfigTable(
        "Qwen3",
        (
            *sizes(151936, 4096, 22016, 32, 32, 32768, 32),
            *rotary_fields(),
            ACTIVATION,
            Field("head_dim", 128, head_dim),
            ATTENTION_BIAS,
            *_QWEN_WINDOWS,
        ),
        {**FIXED, "qk_norm": True},
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    ConfigTable(
        "Phi-3",
        (
            *sizes(32064, 3072, 8192, 32, 32, 4096, norm_eps=1e-5, padding=32000),
            *rotary_fields(share_field="partial_rotary_factor", kind_aliases={"yarn": "longrope"}),
            ACTIVATION,
            Field("sliding_window", None, window),
            Field(
                "resid_pdrop",
                0.0,
                allowed=(0.0,),
                reason="dropout would also apply to the embedding",
            ),
            Field("attention_bias", False, allowed=(False, None), reason=_NO_BIAS),
            Field("mlp_bias", False, allowed=(False, None), reason=_NO_BIAS),
            Field("lm_head_bias", False, allowed=(False, None), reason=_NO_BIAS),
        ),
        FIXED,
        # There is no dropout after the embedding regardless of this field; the others belong to
        # other code.
        frozenset({"embd_pdrop", "interpolate_factor", "full_attn_mod"}),
    ),
    FUSED_NAMES,
    ignored=OUTDATED,
)
