"""Families like Llama: Granite has factors of embeddings, scores, residual additions and logits;
ERNIE 4.5, Helium, GLM and GLM-4 rotate neighbouring elements; some layers of SmolLM3 rotate
nothing; StarCoder2 has LayerNorm and biases; OLMo 2 and 3 and EXAONE 4 have norms of queries and
keys, and norms after each part of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.fields import Field, Values, only, padding_id, positive
from lightning_megatron.swap.families.llama import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    COMMON,
    HEAD_DIM,
    LLAMA_FIELDS,
    LLAMA_NAMES,
    LONG_WINDOWS,
    MLP_BIAS,
    SIZES,
    WINDOW,
    WINDOWS,
    like_llama,
)
from lightning_megatron.swap.families.rotary import rotary_fields

_QKV_BIAS = Field("attention_bias", lambda values: {"qkv_bias": bool(values["attention_bias"])})
_GLM_FIELDS = (*COMMON, *rotary_fields(partial=True), _QKV_BIAS)
_GLM_NAMES = replace(LLAMA_NAMES, up=("model.layers.{}.mlp.gate_up_proj",))
_STARCODER_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_OLMO_NAMES = replace(
    LLAMA_NAMES,
    attention_norm="",
    mlp_norm="",
    attention_output_norm="model.layers.{}.post_attention_layernorm",
    mlp_output_norm="model.layers.{}.post_feedforward_layernorm",
)
_OLMO: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "layer", "norm_position": "output"}


def _rotary_windows(values: Values) -> Mapping[str, Any]:
    # Unless all layers attend to everything, those without a window rotate nothing.
    rotating = tuple(kind == "sliding_attention" for kind in values["layer_types"])
    return {"rotary_layers": None if values["sliding_window"] is None else rotating}


def _rotary_layers(values: Values) -> Mapping[str, Any]:
    # Despite its name, the field lists the layers that rotate.
    rotating = tuple(map(bool, values["no_rope_layers"]))
    return {"rotary_layers": None if all(rotating) else rotating}


GRANITE = like_llama(
    "granite",
    "GraniteForCausalLM",
    (
        *LLAMA_FIELDS,
        Field("embedding_multiplier", "embedding_scale"),
        Field("attention_multiplier", "attention_scale"),
        Field("residual_multiplier", "residual_scale"),
        Field("logits_scaling", lambda v: {"logit_scale": 1 / positive(v, "logits_scaling")}),
    ),
    scales_vectors=True,
)

ERNIE45 = like_llama(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    (
        *(field for field in COMMON if field != ATTENTION_DROPOUT),
        *rotary_fields(),
        Field("use_bias", "bias"),
    ),
    rotary_interleaved=True,
)

HELIUM = like_llama(
    "helium",
    "HeliumForCausalLM",
    (*COMMON, *rotary_fields(), _QKV_BIAS, MLP_BIAS),
    rotary_interleaved=True,
)

GLM = like_llama("glm", "GlmForCausalLM", _GLM_FIELDS, _GLM_NAMES, rotary_interleaved=True)

GLM4 = like_llama(
    "glm4",
    "Glm4ForCausalLM",
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
    (*LLAMA_FIELDS, Field("no_rope_layers", _rotary_layers), *WINDOWS),
    # transformers derives the types of layers from them.
    skipped="use_sliding_window no_rope_layer_interval",
)

STARCODER2 = like_llama(
    "starcoder2",
    "Starcoder2ForCausalLM",
    (
        *SIZES,
        *HEAD_DIM,
        *rotary_fields(),
        ATTENTION_DROPOUT,
        Field("num_key_value_heads", "num_kv_heads"),
        Field("hidden_act", "activation", _STARCODER_ACTIVATIONS),
        Field("norm_epsilon", "norm_eps"),
        Field("pad_token_id", padding_id),
        WINDOW,
        only("use_bias", "norms have biases, and so have all projections", True),
        only("residual_dropout", "dropout would also apply to the embedding", 0.0),
        only("embedding_dropout", "dropout would also apply before the residual sums", 0.0),
    ),
    replace(LLAMA_NAMES, up=("model.layers.{}.mlp.c_fc",), down="model.layers.{}.mlp.c_proj"),
    # Fields of earlier code: the class has one kind of norm and of MLP.
    skipped="norm_type mlp_type",
    norm="layernorm",
    bias=True,
)

OLMO2 = like_llama(
    "olmo2", "Olmo2ForCausalLM", (*COMMON, *rotary_fields(), ATTENTION_BIAS), _OLMO_NAMES, **_OLMO
)

OLMO3 = like_llama(
    "olmo3",
    "Olmo3ForCausalLM",
    (*COMMON, *rotary_fields(typed=True), ATTENTION_BIAS, *LONG_WINDOWS),
    _OLMO_NAMES,
    **_OLMO,
)

EXAONE4 = like_llama(
    "exaone4",
    "Exaone4ForCausalLM",
    (*COMMON, *rotary_fields(), *WINDOWS, Field("sliding_window", _rotary_windows)),
    _OLMO_NAMES,
    # transformers derives the types of layers from it.
    skipped="sliding_window_pattern",
    qk_norm=True,
    norm_position="output",
)

FAMILIES = (OLMO2, OLMO3, GRANITE, GLM, GLM4, SMOLLM3, STARCODER2, ERNIE45, HELIUM, EXAONE4)
