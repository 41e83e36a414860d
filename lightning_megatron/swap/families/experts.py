"""Families with mixtures of experts and attention as in Llama: Mixtral, Qwen3-MoE, OLMoE,
Qwen2-MoE, whose shared MLP has a gate, and gpt-oss with biases, bounded features and sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.model_shape import FEATURE_LIMIT, GATE_FACTOR
from lightning_megatron.plan.settings import shown
from lightning_megatron.swap.families.field_kinds import Number
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values, only, refusal
from lightning_megatron.swap.families.layer_names import SETTINGS, ExpertNames
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
from lightning_megatron.swap.families.rotary import rotary_fields
from lightning_megatron.swap.tensors.packed import Packed

#: Training settings that Hugging Face has no fields for.
TRAINING_FIELDS = tuple(
    "aux_loss aux_loss_scope z_loss jitter capacity_factor expert_bias_rate".split()
)

MLP = "model.layers.{}.mlp"
_MOE = "model.layers.{}.block_sparse_moe"
_GATE_UP = f"{MLP}.experts.gate_up_proj"
_DOWN = f"{MLP}.experts.down_proj"
PARTS = ("gate_proj", "up_proj", "down_proj")
_EXPERT = tuple(f"{MLP}.experts.{{}}.{part}" for part in PARTS)
#: Names of the tensors of most families with experts.
EXPERT_NAMES = ExpertNames(router=f"{MLP}.gate", up=_EXPERT[:2], down=_EXPERT[2])
PACKED_EXPERTS = (
    Packed(_GATE_UP, tuple(f"{name}.weight" for name in _EXPERT[:2])),
    Packed(_DOWN, (f"{_EXPERT[2]}.weight",)),
)


def sparse_layers(values: Values) -> Mapping[str, Any]:
    """Return the layers with experts of a Qwen model."""
    step = values["decoder_sparse_step"]
    dense = values["mlp_only_layers"]
    num_layers = values["num_hidden_layers"]
    if not dense:
        return {"layers": step}
    return {
        "layers": tuple(
            (layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)
        )
    }


def all_layers(values: Values) -> Mapping[str, Any]:
    """Return that all layers have experts."""
    return {"layers": 1}


def balanced(layers: Callable[[Values], Mapping[str, Any]]) -> tuple[Field, ...]:
    """Return the field rules for load balancing of the experts in some layers."""

    def rule(values: Values) -> Mapping[str, Any]:
        if not values["output_router_logits"]:
            return {}
        count = values["num_hidden_layers"]
        where = layers(values)["layers"]
        num_layers = sum(where) if isinstance(where, tuple) else count // where
        weight = values["router_aux_loss_coef"] * values["num_experts_per_tok"] / max(num_layers, 1)
        raise UnsupportedError(
            "output_router_logits must be False: it is True. It adds one loss over the tokens of "
            "all layers, which no pipeline stage has together; here every layer has its own loss. "
            f"Set it to False, and {SETTINGS} of the configuration to {{'aux_loss': "
            f"{weight:.6g}}}, which has the same weight if all layers have the same load "
            "(router_aux_loss_coef times num_experts_per_tok, for each layer with experts)."
        )

    # The coefficient takes effect only if output_router_logits is on.
    return (
        Field("output_router_logits", False, rule),
        Field("router_aux_loss_coef", 0.001),
        OWN_SETTINGS,
    )


def _own_settings(values: Values) -> Mapping[str, Any]:
    settings = values[SETTINGS] or {}
    if not isinstance(settings, Mapping) or not settings.keys() <= set(TRAINING_FIELDS):
        raise UnsupportedError(
            f"{SETTINGS} of a configuration must be a mapping with some of "
            f"{', '.join(TRAINING_FIELDS)}: it is {shown(settings)}. All other fields of "
            "ExpertsConfig follow from Hugging Face's own fields. Leave out all other names."
        )
    return settings


OWN_SETTINGS = Field(SETTINGS, None, _own_settings)


def mixture(called: str, *fields: Field, **fixed: Any) -> ConfigTable:
    """Return the table of a family's experts; ``fixed`` holds what all of its models share."""
    return ConfigTable(called, fields, fixed, build=ExpertsConfig)


def _window_of_all(values: Values) -> Mapping[str, Any]:
    if not values["use_sliding_window"]:
        return {}
    first = values["max_window_layers"]
    if first:
        reason = "versions of transformers disagree about whether all layers have the window then"
        raise refusal("Qwen3-MoE", "max_window_layers", first, reason, (None, 0))
    return window(values)


def _every_other(values: Values) -> Mapping[str, Any]:
    if not values["use_sliding_window"]:
        return {}
    most = values["max_window_layers"]
    return windows_of(values, "Qwen2-MoE", lambda layer: layer % 2 == 0 and layer < most)


MIXTRAL = like_llama(
    "mixtral",
    "MixtralForCausalLM",
    "Mixtral",
    (
        *sizes(32000, 4096, 14336, 32, 32, 131072, 8, norm_eps=1e-5),
        *rotary_fields(default_base=1e6),
        ACTIVATION,
        HEAD_DIM,
        Field("sliding_window", None, window),
        only(
            "router_jitter_noise",
            0.0,
            "noise would change only the input of the router, but Hugging Face's changes "
            "the input of the experts, too",
            None,
        ),
    ),
    replace(
        LLAMA_NAMES,
        experts=ExpertNames(
            router=f"{_MOE}.gate",
            up=(f"{_MOE}.experts.{{}}.w1", f"{_MOE}.experts.{{}}.w3"),
            down=f"{_MOE}.experts.{{}}.w2",
        ),
    ),
    parts={
        "experts": mixture(
            "Mixtral",
            Field("num_hidden_layers", 32),
            Field("num_local_experts", 8, "num_experts", aliases=("num_experts",)),
            Field("num_experts_per_tok", 2, "top_k"),
            Field("intermediate_size", 14336, "ffn_hidden_size"),
            *balanced(all_layers),
            scoring="softmax",
            normalize_top_k=True,
        )
    },
    packed=(
        Packed(f"{MLP}.gate.weight", (f"{_MOE}.gate.weight",)),
        Packed(_GATE_UP, (f"{_MOE}.experts.{{}}.w1.weight", f"{_MOE}.experts.{{}}.w3.weight")),
        Packed(_DOWN, (f"{_MOE}.experts.{{}}.w2.weight",)),
    ),
)

QWEN3_MOE = like_llama(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3-MoE",
    (
        *sizes(151936, 2048, 6144, 24, 32, 32768, 4),
        *COMMON,
        HEAD_DIM,
        ATTENTION_BIAS,
        Field("use_sliding_window", False),
        Field("sliding_window", 4096, _window_of_all),
        Field("max_window_layers", None),
    ),
    replace(LLAMA_NAMES, experts=EXPERT_NAMES),
    parts={
        "experts": mixture(
            "Qwen3-MoE",
            Field("num_hidden_layers", 24),
            Field("num_local_experts", 128, "num_experts", aliases=("num_experts",)),
            Field("num_experts_per_tok", 8, "top_k"),
            Field("moe_intermediate_size", 768, "ffn_hidden_size"),
            Field("norm_topk_prob", False, "normalize_top_k"),
            Field("decoder_sparse_step", 1, sparse_layers),
            Field("mlp_only_layers", None),
            *balanced(sparse_layers),
            scoring="softmax",
        )
    },
    packed=PACKED_EXPERTS,
    qk_norm=True,
)

QWEN2_MOE = like_llama(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "Qwen2-MoE",
    (
        *sizes(151936, 2048, 5632, 24, 16, 32768, 16),
        *COMMON,
        HEAD_DIM,
        Field("qkv_bias", True, "qkv_bias"),
        Field("use_sliding_window", False),
        # Files of models without windows have 0.
        Field("sliding_window", 4096, kind=Number | None),
        Field("max_window_layers", 28, kind=Number),
        Field("layer_types", None, _every_other),
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
    parts={
        "experts": mixture(
            "Qwen2-MoE",
            Field("num_hidden_layers", 24),
            Field("num_experts", 60, "num_experts"),
            Field("num_experts_per_tok", 4, "top_k"),
            Field("moe_intermediate_size", 1408, "ffn_hidden_size"),
            Field("shared_expert_intermediate_size", 5632, "shared_ffn_hidden_size"),
            Field("norm_topk_prob", False, "normalize_top_k"),
            Field("decoder_sparse_step", 1, sparse_layers),
            Field("mlp_only_layers", None),
            *balanced(sparse_layers),
            scoring="softmax",
            shared_gate=True,
        )
    },
    packed=PACKED_EXPERTS,
)

OLMOE = like_llama(
    "olmoe",
    "OlmoeForCausalLM",
    "OLMoE",
    (
        *sizes(50304, 2048, 2048, 16, 16, 4096, norm_eps=1e-5, padding=1),
        *COMMON,
        ATTENTION_BIAS,
        only("clip_qkv", None, "queries, keys and values have no bounds"),
    ),
    replace(LLAMA_NAMES, experts=EXPERT_NAMES),
    parts={
        "experts": mixture(
            "OLMoE",
            Field("num_hidden_layers", 16),
            Field("num_experts", 64, "num_experts", aliases=("num_local_experts",)),
            Field("num_experts_per_tok", 8, "top_k"),
            Field("intermediate_size", 2048, "ffn_hidden_size"),
            Field("norm_topk_prob", False, "normalize_top_k"),
            *balanced(all_layers),
            scoring="softmax",
        )
    },
    packed=PACKED_EXPERTS,
    qk_norm=True,
    qk_norm_over="layer",
)

#: Rotary settings of a gpt-oss configuration without them.
_POSITIONS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ACTIVATION_REASON = "experts have the activation of the published models"


def _alternating(values: Values) -> Mapping[str, Any]:
    return windows_of(values, "gpt-oss", lambda layer: layer % 2 == 0)


def _stack(name: str, parts: tuple[str, ...]) -> tuple[Packed, ...]:
    """Return the rules of gpt-oss's weights, stored input first, and of the biases of all experts.

    The rows of a stack alternate between gates and the features that the gates multiply.
    """
    interleaved = len(parts) > 1
    weights = tuple(f"{part}.weight" for part in parts)
    biases = tuple(f"{part}.bias" for part in parts)
    settings = {"interleaved": interleaved, "is_in_files": True}
    return (
        Packed(f"{MLP}.experts.{name}", weights, is_transposed=True, **settings),
        Packed(f"{MLP}.experts.{name}_bias", biases, **settings),
    )


_ROTARY, *_ROTARY_OTHERS = rotary_fields(default_base=150000.0)

GPT_OSS = like_llama(
    "gpt_oss",
    "GptOssForCausalLM",
    "gpt-oss",
    (
        *sizes(201088, 2880, 2880, 36, 64, 131072, 8, norm_eps=1e-5),
        replace(_ROTARY, default=_POSITIONS),
        *_ROTARY_OTHERS,
        only("hidden_act", "silu", _ACTIVATION_REASON),
        only("swiglu_alpha", GATE_FACTOR, _ACTIVATION_REASON),
        only("swiglu_limit", FEATURE_LIMIT, _ACTIVATION_REASON),
        Field("head_dim", 64, head_dim),
        replace(ATTENTION_BIAS, default=True),
        Field("sliding_window", 128),
        Field("layer_types", None, _alternating),
    ),
    # The names of single experts are used only in the table: files and the class have one stack.
    replace(
        LLAMA_NAMES,
        sinks="model.layers.{}.self_attn.sinks",
        experts=ExpertNames(router=f"{MLP}.router", up=_EXPERT[:2], down=_EXPERT[2]),
    ),
    parts={
        "experts": mixture(
            "gpt-oss",
            Field("num_hidden_layers", 36),
            Field("num_local_experts", 128, "num_experts", aliases=("num_experts",)),
            Field("num_experts_per_tok", 4, "top_k"),
            Field("intermediate_size", 2880, "ffn_hidden_size"),
            *balanced(all_layers),
            scoring="softmax",
            normalize_top_k=True,
            linear_bias=True,
            router_bias=True,
        )
    },
    packed=(*_stack("gate_up_proj", _EXPERT[:2]), *_stack("down_proj", _EXPERT[2:])),
    # Fields of OpenAI's own code; other fields have the same meaning.
    skipped="experts_per_token initial_context_length",
    activation="clamped_swiglu",
    attention_sinks=True,
)

FAMILIES = (MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, GPT_OSS)
