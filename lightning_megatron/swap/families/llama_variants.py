"""Families like Llama: Granite has factors of embeddings, scores, residual additions and logits;
ERNIE 4.5, Helium, GLM and GLM-4 rotate neighbouring elements; some layers of SmolLM3 rotate
nothing; StarCoder2 has LayerNorm and biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values, translate_values
from lightning_megatron.swap.families.llama import LLAMA_NAMES
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

# Rotations of neighbouring elements.
_INTERLEAVED = {**FIXED, "rotary_interleaved": True}
_GLM_FIELDS = (
    *sizes(151552, 4096, 13696, 40, 32, 131072, 2, norm_eps=1.5625e-07, padding=151329),
    *rotary_fields(share_field="partial_rotary_factor", default_share=0.5),
    ACTIVATION,
    Field("head_dim", 128, head_dim),
    Field("attention_bias", True, lambda values: {"qkv_bias": bool(values["attention_bias"])}),
)
_GLM_NAMES = replace(LLAMA_NAMES, up=("model.layers.{}.mlp.gate_up_proj",))
_STARCODER_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_STARCODER_SIZES = sizes(49152, 3072, 12288, 30, 24, 4096, 2, tied=True)


def _ernie_biases(values: Values) -> Mapping[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(values["use_bias"]))


def _rotating_layers(values: Values) -> tuple[bool, ...]:
    # Despite its name, the field lists the layers that rotate.
    flags = values["no_rope_layers"]
    if flags is not None:
        return tuple(bool(flag) for flag in flags)
    every = values["no_rope_layer_interval"]
    return tuple((layer + 1) % every != 0 for layer in range(values["num_hidden_layers"]))


def _rotary_layers(values: Values) -> Mapping[str, Any]:
    rotating = _rotating_layers(values)
    return {"rotary_layers": None if all(rotating) else rotating}


def _windows(values: Values) -> Mapping[str, Any]:
    width = values["sliding_window"] if values["use_sliding_window"] else None
    types = values["layer_types"]
    if types is None:
        types = [
            "full_attention" if rotates or width is None else "sliding_attention"
            for rotates in _rotating_layers(values)
        ]
    return windows_of(types, width, values, "SmolLM3")


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

ERNIE45 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    ConfigTable(
        "ERNIE 4.5",
        (
            *sizes(103424, 1024, 3072, 18, 16, 131072, 2, norm_eps=1e-5, tied=True, padding=0),
            *rotary_fields(default_base=500000.0),
            ACTIVATION,
            Field("head_dim", 128, head_dim),
            Field("use_bias", False, _ernie_biases, kind=bool | None),
        ),
        _INTERLEAVED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    ConfigTable(
        "Helium",
        (
            *sizes(48000, 2560, 7040, 24, 20, 4096, 20, norm_eps=1e-8, padding=3),
            *rotary_fields(default_base=100000.0),
            ACTIVATION,
            Field("head_dim", 128, head_dim),
            Field(
                "attention_bias", False, lambda values: {"qkv_bias": bool(values["attention_bias"])}
            ),
            Field("mlp_bias", False, "mlp_bias"),
        ),
        _INTERLEAVED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

GLM = Family(
    "glm",
    "GlmForCausalLM",
    ConfigTable("GLM", _GLM_FIELDS, _INTERLEAVED),
    _GLM_NAMES,
    ignored=OUTDATED,
)

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    ConfigTable("GLM-4", _GLM_FIELDS, {**_INTERLEAVED, "norm_position": "sandwich"}),
    replace(
        _GLM_NAMES,
        attention_output_norm="model.layers.{}.post_self_attn_layernorm",
        mlp_output_norm="model.layers.{}.post_mlp_layernorm",
    ),
    ignored=OUTDATED,
)

SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    ConfigTable(
        "SmolLM3",
        (
            *sizes(128256, 2048, 11008, 36, 16, 32768, 4, tied=True, padding=128004),
            *rotary_fields(default_base=2e6),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
            Field("mlp_bias", False, "mlp_bias"),
            Field("no_rope_layers", None, _rotary_layers),
            Field("no_rope_layer_interval", 4),
            Field("use_sliding_window", False),
            Field("sliding_window", None),
            Field("layer_types", None, _windows),
        ),
        FIXED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    ConfigTable(
        "StarCoder2",
        (
            *(
                replace(field, default=0.018042) if field.name == "initializer_range" else field
                for field in _STARCODER_SIZES
                if field.name != "rms_norm_eps"
            ),
            *rotary_fields(),
            HEAD_DIM,
            Field(
                "hidden_act",
                "gelu_pytorch_tanh",
                translate_values("hidden_act", "activation", _STARCODER_ACTIVATIONS),
            ),
            Field("norm_epsilon", 1e-5, "norm_eps"),
            Field("sliding_window", None, window),
            Field(
                "use_bias",
                True,
                allowed=(True,),
                reason="norms have biases, and so have all projections",
            ),
            Field(
                "residual_dropout",
                0.0,
                allowed=(0.0,),
                reason="dropout would also apply to the embedding",
            ),
            Field(
                "embedding_dropout",
                0.0,
                allowed=(0.0,),
                reason="dropout would also apply before the residual sums",
            ),
        ),
        {"norm": "layernorm", "position": "rotary", "bias": True},
        # Fields of earlier code: the class has one kind of norm and of MLP.
        frozenset({"norm_type", "mlp_type"}),
    ),
    replace(
        LLAMA_NAMES,
        up=("model.layers.{}.mlp.c_fc",),
        down="model.layers.{}.mlp.c_proj",
    ),
    ignored=OUTDATED,
)
