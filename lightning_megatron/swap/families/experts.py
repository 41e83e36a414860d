"""Families with mixtures of experts and attention as in Llama: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.settings import shown
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values, refusal
from lightning_megatron.swap.families.layer_names import SETTINGS, ExpertNames
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    ATTENTION_BIAS,
    FIXED,
    HEAD_DIM,
    OUTDATED,
    sizes,
    window,
)
from lightning_megatron.swap.families.rotary import rotary_fields
from lightning_megatron.swap.tensors.packed import Packed

#: Training settings that Hugging Face has no fields for.
TRAINING_FIELDS = (
    "aux_loss",
    "aux_loss_scope",
    "z_loss",
    "jitter",
    "capacity_factor",
    "expert_bias_rate",
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
    """Return the field rules for load balancing of experts.

    Args:
        layers: Function that returns the layers with experts.
    """

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


def _window_of_all(values: Values) -> Mapping[str, Any]:
    if not values["use_sliding_window"]:
        return {}
    first = values["max_window_layers"]
    if first:
        reason = "versions of transformers disagree about whether all layers have the window then"
        raise refusal("Qwen3-MoE", "max_window_layers", first, reason, (None, 0))
    return window(values)


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    ConfigTable(
        "Mixtral",
        (
            *sizes(32000, 4096, 14336, 32, 32, 131072, 8, norm_eps=1e-5),
            *rotary_fields(default_base=1e6),
            ACTIVATION,
            HEAD_DIM,
            Field("sliding_window", None, window),
            Field(
                "router_jitter_noise",
                0.0,
                allowed=(0.0, None),
                reason=(
                    "noise would change only the input of the router, but Hugging Face's changes "
                    "the input of the experts, too"
                ),
            ),
        ),
        FIXED,
        parts={
            "experts": ConfigTable(
                "Mixtral",
                (
                    Field("num_hidden_layers", 32),
                    Field("num_local_experts", 8, "num_experts", aliases=("num_experts",)),
                    Field("num_experts_per_tok", 2, "top_k"),
                    Field("intermediate_size", 14336, "ffn_hidden_size"),
                    *balanced(all_layers),
                ),
                {"scoring": "softmax", "normalize_top_k": True},
                build=ExpertsConfig,
            )
        },
    ),
    replace(
        LLAMA_NAMES,
        experts=ExpertNames(
            router=f"{_MOE}.gate",
            up=(f"{_MOE}.experts.{{}}.w1", f"{_MOE}.experts.{{}}.w3"),
            down=f"{_MOE}.experts.{{}}.w2",
        ),
    ),
    ignored=OUTDATED,
    packed=(
        Packed(f"{MLP}.gate.weight", (f"{_MOE}.gate.weight",)),
        Packed(_GATE_UP, (f"{_MOE}.experts.{{}}.w1.weight", f"{_MOE}.experts.{{}}.w3.weight")),
        Packed(_DOWN, (f"{_MOE}.experts.{{}}.w2.weight",)),
    ),
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ConfigTable(
        "Qwen3-MoE",
        (
            *sizes(151936, 2048, 6144, 24, 32, 32768, 4),
            *rotary_fields(),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
            Field("use_sliding_window", False),
            Field("sliding_window", 4096, _window_of_all),
            Field("max_window_layers", None),
        ),
        {**FIXED, "qk_norm": True},
        parts={
            "experts": ConfigTable(
                "Qwen3-MoE",
                (
                    Field("num_hidden_layers", 24),
                    Field("num_local_experts", 128, "num_experts", aliases=("num_experts",)),
                    Field("num_experts_per_tok", 8, "top_k"),
                    Field("moe_intermediate_size", 768, "ffn_hidden_size"),
                    Field("norm_topk_prob", False, "normalize_top_k"),
                    Field("decoder_sparse_step", 1, sparse_layers),
                    Field("mlp_only_layers", None),
                    *balanced(sparse_layers),
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
