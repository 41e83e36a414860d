"""Families with mixtures of experts and attention as in Llama: Mixtral, Qwen3-MoE, OLMoE,
Qwen2-MoE, whose shared MLP has a gate, and gpt-oss with biases, bounded features and sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.model_shape import FEATURE_LIMIT, GATE_FACTOR
from lightning_megatron.plan.settings import shown
from lightning_megatron.swap.families.fields import Field, Values, only, positive
from lightning_megatron.swap.families.layer_names import SETTINGS, ExpertNames
from lightning_megatron.swap.families.llama import (
    ACTIVATION,
    ATTENTION_BIAS,
    COMMON,
    LLAMA_NAMES,
    WINDOW,
    WINDOW_FIELDS,
    WINDOWS,
    like_llama,
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


def _sparse_layers(values: Values) -> Mapping[str, Any]:
    """Return the layers with experts of a Qwen model."""
    dense = values["mlp_only_layers"]
    num_layers = values["num_hidden_layers"]
    if not dense:
        return {"layers": values["decoder_sparse_step"]}
    step = positive(values, "decoder_sparse_step")
    return {
        "layers": tuple(
            (layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)
        )
    }


def mixture(*fields: Field, **fixed: Any) -> tuple[Field, ...]:
    """Return the rules of a family's experts.

    Args:
        fields: Rules whose targets are fields of ``ExpertsConfig``.
        fixed: Fields of ``ExpertsConfig`` that all models of the family share.
    """

    def rule(values: Values) -> Mapping[str, Any]:
        settings = dict(fixed)
        for field in fields:
            settings |= field.settings(values)
        if values.get("output_router_logits"):
            _refuse_loss(values, settings.get("layers", 1))
        return {"experts": {**settings, **_own_settings(values)}}

    names = {field.name for field in fields} | {
        "output_router_logits",
        # The coefficient takes effect only if output_router_logits is on.
        "router_aux_loss_coef",
        SETTINGS,
    }
    return (Field("num_experts_per_tok", rule), *map(Field, sorted(names)))


def _refuse_loss(values: Values, layers: int | tuple[bool, ...]) -> None:
    count = values["num_hidden_layers"]
    num_layers = sum(layers) if isinstance(layers, tuple) else count // layers
    weight = values["router_aux_loss_coef"] * values["num_experts_per_tok"] / max(num_layers, 1)
    raise UnsupportedError(
        "output_router_logits must be False: it is True. It adds one loss over the tokens of all "
        "layers, which no pipeline stage has together; here every layer has its own loss. Set it "
        f"to False, and {SETTINGS} of the configuration to {{'aux_loss': {weight:.6g}}}, which "
        "has the same weight if all layers have the same load (router_aux_loss_coef times "
        "num_experts_per_tok, for each layer with experts)."
    )


def _own_settings(values: Values) -> Mapping[str, Any]:
    settings = values.get(SETTINGS) or {}
    if not isinstance(settings, Mapping) or not settings.keys() <= set(TRAINING_FIELDS):
        raise UnsupportedError(
            f"{SETTINGS} of a configuration must be a mapping with some of "
            f"{', '.join(TRAINING_FIELDS)}: it is {shown(settings)}. All other fields of "
            "ExpertsConfig follow from Hugging Face's own fields. Leave out all other names."
        )
    return settings


_TOP_K = Field("num_experts_per_tok", "top_k")
_NORMALIZE = Field("norm_topk_prob", "normalize_top_k")
_NUM_EXPERTS = Field("num_experts", "num_experts")
_NUM_LOCAL_EXPERTS = Field("num_local_experts", "num_experts")
_SIZE = Field("moe_intermediate_size", "ffn_hidden_size")
_SIZE_OF_MLP = Field("intermediate_size", "ffn_hidden_size")
_SPARSE = (Field("decoder_sparse_step", _sparse_layers), Field("mlp_only_layers"))

MIXTRAL = like_llama(
    "mixtral",
    "MixtralForCausalLM",
    (
        *COMMON,
        *rotary_fields(),
        WINDOW,
        only(
            "router_jitter_noise",
            "noise would change only the input of the router, but Hugging Face's changes "
            "the input of the experts, too",
            0.0,
            None,
        ),
        *mixture(_NUM_LOCAL_EXPERTS, _TOP_K, _SIZE_OF_MLP, scoring="softmax", normalize_top_k=True),
    ),
    replace(
        LLAMA_NAMES,
        experts=ExpertNames(
            router=f"{_MOE}.gate",
            up=(f"{_MOE}.experts.{{}}.w1", f"{_MOE}.experts.{{}}.w3"),
            down=f"{_MOE}.experts.{{}}.w2",
        ),
    ),
    packed=(
        Packed(f"{MLP}.gate.weight", (f"{_MOE}.gate.weight",)),
        Packed(_GATE_UP, (f"{_MOE}.experts.{{}}.w1.weight", f"{_MOE}.experts.{{}}.w3.weight")),
        Packed(_DOWN, (f"{_MOE}.experts.{{}}.w2.weight",)),
    ),
)

QWEN3_MOE = like_llama(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *COMMON,
        *rotary_fields(),
        ATTENTION_BIAS,
        WINDOW,
        *mixture(_NUM_LOCAL_EXPERTS, _TOP_K, _SIZE, _NORMALIZE, *_SPARSE, scoring="softmax"),
    ),
    replace(LLAMA_NAMES, experts=EXPERT_NAMES),
    packed=PACKED_EXPERTS,
    skipped=WINDOW_FIELDS,
    qk_norm=True,
)

QWEN2_MOE = like_llama(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *COMMON,
        *rotary_fields(),
        Field("qkv_bias", "qkv_bias"),
        *WINDOWS,
        *mixture(
            _NUM_EXPERTS,
            _TOP_K,
            _SIZE,
            _NORMALIZE,
            *_SPARSE,
            Field("shared_expert_intermediate_size", "shared_ffn_hidden_size"),
            scoring="softmax",
            shared_gate=True,
        ),
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
    packed=PACKED_EXPERTS,
    skipped=WINDOW_FIELDS,
)

OLMOE = like_llama(
    "olmoe",
    "OlmoeForCausalLM",
    (
        *COMMON,
        *rotary_fields(),
        ATTENTION_BIAS,
        only("clip_qkv", "queries, keys and values have no bounds", None),
        *mixture(_NUM_EXPERTS, _TOP_K, _SIZE_OF_MLP, _NORMALIZE, scoring="softmax"),
    ),
    replace(LLAMA_NAMES, experts=EXPERT_NAMES),
    packed=PACKED_EXPERTS,
    qk_norm=True,
    qk_norm_over="layer",
)

_ACTIVATION_REASON = "experts have the activation of the published models"


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


GPT_OSS = like_llama(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *(field for field in COMMON if field != ACTIVATION),
        *rotary_fields(),
        only("hidden_act", _ACTIVATION_REASON, "silu"),
        only("swiglu_alpha", _ACTIVATION_REASON, GATE_FACTOR),
        only("swiglu_limit", _ACTIVATION_REASON, FEATURE_LIMIT),
        ATTENTION_BIAS,
        *WINDOWS,
        *mixture(
            _NUM_LOCAL_EXPERTS,
            _TOP_K,
            _SIZE_OF_MLP,
            scoring="softmax",
            normalize_top_k=True,
            linear_bias=True,
            router_bias=True,
        ),
    ),
    # The names of single experts are used only in the table: files and the class have one stack.
    replace(
        LLAMA_NAMES,
        sinks="model.layers.{}.self_attn.sinks",
        experts=ExpertNames(router=f"{MLP}.router", up=_EXPERT[:2], down=_EXPERT[2]),
    ),
    packed=(*_stack("gate_up_proj", _EXPERT[:2]), *_stack("down_proj", _EXPERT[2:])),
    # Fields of OpenAI's own code; other fields have the same meaning.
    skipped="experts_per_token initial_context_length",
    activation="clamped_swiglu",
    attention_sinks=True,
)

FAMILIES = (MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, GPT_OSS)
