"""Families like Llama: Granite has factors of embeddings, scores, residual additions and logits;
ERNIE 4.5, Helium, GLM and GLM-4 rotate neighbouring elements; some layers of SmolLM3 rotate
nothing; StarCoder2 has LayerNorm and biases; OLMo 2 and 3 have norms of all heads of queries and
keys, and norms after each part of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.fields import Field, Values, only, translate_values
from lightning_megatron.swap.families.llama import (
    ACTIVATION,
    ATTENTION_BIAS,
    COMMON,
    HEAD_DIM,
    LLAMA_NAMES,
    head_dim,
    like_llama,
    sizes,
    window,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields, typed_rotary_fields

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
_OLMO_FIELDS = (
    *sizes(50304, 4096, 11008, 32, 32, 2048, norm_eps=1e-5, padding=1),
    ACTIVATION,
    HEAD_DIM,
    ATTENTION_BIAS,
)
_OLMO_NAMES = replace(
    LLAMA_NAMES,
    attention_norm="",
    mlp_norm="",
    attention_output_norm="model.layers.{}.post_attention_layernorm",
    mlp_output_norm="model.layers.{}.post_feedforward_layernorm",
)


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


def _smollm_windows(values: Values) -> Mapping[str, Any]:
    has_windows = values["use_sliding_window"] and values["sliding_window"] is not None
    rotating = {layer for layer, rotates in enumerate(_rotating_layers(values)) if rotates}
    return windows_of(
        values,
        "SmolLM3",
        lambda layer: has_windows and layer not in rotating,
        has_windows=has_windows,
    )


def _three_of_four(values: Values) -> Mapping[str, Any]:
    return windows_of(values, "OLMo 3", lambda layer: (layer + 1) % 4 > 0, keeps_all=True)


GRANITE = like_llama(
    "granite",
    "GraniteForCausalLM",
    "Granite",
    (
        *sizes(32000, 4096, 11008, 32, 32, 2048),
        *COMMON,
        HEAD_DIM,
        ATTENTION_BIAS,
        Field("mlp_bias", False, "mlp_bias"),
        Field("embedding_multiplier", 1.0, "embedding_scale"),
        Field("attention_multiplier", 1.0, "attention_scale"),
        Field("residual_multiplier", 1.0, "residual_scale"),
        Field("logits_scaling", 1.0, lambda values: {"logit_scale": 1 / values["logits_scaling"]}),
    ),
    scales_vectors=True,
)

ERNIE45 = like_llama(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    "ERNIE 4.5",
    (
        *sizes(103424, 1024, 3072, 18, 16, 131072, 2, norm_eps=1e-5, tied=True, padding=0),
        *rotary_fields(default_base=500000.0),
        ACTIVATION,
        Field("head_dim", 128, head_dim),
        Field("use_bias", False, _ernie_biases, kind=bool | None),
    ),
    rotary_interleaved=True,
)

HELIUM = like_llama(
    "helium",
    "HeliumForCausalLM",
    "Helium",
    (
        *sizes(48000, 2560, 7040, 24, 20, 4096, 20, norm_eps=1e-8, padding=3),
        *rotary_fields(default_base=100000.0),
        ACTIVATION,
        Field("head_dim", 128, head_dim),
        Field("attention_bias", False, lambda values: {"qkv_bias": bool(values["attention_bias"])}),
        Field("mlp_bias", False, "mlp_bias"),
    ),
    rotary_interleaved=True,
)

GLM = like_llama("glm", "GlmForCausalLM", "GLM", _GLM_FIELDS, _GLM_NAMES, rotary_interleaved=True)

GLM4 = like_llama(
    "glm4",
    "Glm4ForCausalLM",
    "GLM-4",
    _GLM_FIELDS,
    replace(
        _GLM_NAMES,
        attention_output_norm="model.layers.{}.post_self_attn_layernorm",
        mlp_output_norm="model.layers.{}.post_mlp_layernorm",
    ),
    rotary_interleaved=True,
    norm_position="sandwich",
)

SMOLLM3 = like_llama(
    "smollm3",
    "SmolLM3ForCausalLM",
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
        Field("layer_types", None, _smollm_windows),
    ),
)

STARCODER2 = like_llama(
    "starcoder2",
    "Starcoder2ForCausalLM",
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
        only("use_bias", True, "norms have biases, and so have all projections"),
        only("residual_dropout", 0.0, "dropout would also apply to the embedding"),
        only("embedding_dropout", 0.0, "dropout would also apply before the residual sums"),
    ),
    replace(LLAMA_NAMES, up=("model.layers.{}.mlp.c_fc",), down="model.layers.{}.mlp.c_proj"),
    # Fields of earlier code: the class has one kind of norm and of MLP.
    skipped="norm_type mlp_type",
    norm="layernorm",
    bias=True,
)

OLMO2 = like_llama(
    "olmo2",
    "Olmo2ForCausalLM",
    "OLMo 2",
    (*_OLMO_FIELDS, *rotary_fields()),
    _OLMO_NAMES,
    qk_norm=True,
    qk_norm_over="layer",
    norm_position="output",
)

OLMO3 = like_llama(
    "olmo3",
    "Olmo3ForCausalLM",
    "OLMo 3",
    (
        *_OLMO_FIELDS,
        *typed_rotary_fields(500000.0, _three_of_four, window_base=500000.0),
        Field("sliding_window", 4096),
        Field("layer_types", None, _three_of_four),
    ),
    _OLMO_NAMES,
    qk_norm=True,
    qk_norm_over="layer",
    norm_position="output",
)

FAMILIES = (OLMO2, OLMO3, GRANITE, GLM, GLM4, SMOLLM3, STARCODER2, ERNIE45, HELIUM)
