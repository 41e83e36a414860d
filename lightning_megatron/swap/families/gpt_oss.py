"""gpt-oss: experts with biases and bounded features, sinks, and windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.plan.experts import ExpertsConfig
from lightning_megatron.plan.model_shape import FEATURE_LIMIT, GATE_FACTOR
from lightning_megatron.swap.families.experts import MLP, PARTS, all_layers, balanced
from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values
from lightning_megatron.swap.families.layer_names import ExpertNames
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ATTENTION_BIAS,
    FIXED,
    OUTDATED,
    head_dim,
    sizes,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields
from lightning_megatron.swap.tensors.packed import Packed

_STACKS = f"{MLP}.experts"
#: Names that only the table uses. Files and the class have one stack of all experts.
_EXPERT = tuple(f"{_STACKS}.{{}}.{part}" for part in PARTS)
#: Rotary settings of a configuration without them.
_POSITIONS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ACTIVATION_REASON = "experts have the activation of the published models"
#: Fields of OpenAI's own code; other fields have the same meaning.
_DUPLICATES = frozenset({"experts_per_token", "initial_context_length"})


def _windows(values: Values) -> Mapping[str, Any]:
    types = values["layer_types"]
    if types is None:
        kinds = ("sliding_attention", "full_attention")
        types = [kinds[layer % 2] for layer in range(values["num_hidden_layers"])]
    return windows_of(types, values["sliding_window"], values, "gpt-oss")


def _stack(name: str, parts: tuple[str, ...]) -> tuple[Packed, ...]:
    """Return the rules of the weights, stored input first, and of the biases of all experts.

    The rows of a stack alternate between gates and the features that the gates multiply.
    """
    interleaved = len(parts) > 1
    weights = tuple(f"{part}.weight" for part in parts)
    biases = tuple(f"{part}.bias" for part in parts)
    settings = {"interleaved": interleaved, "is_in_files": True}
    return (
        Packed(f"{_STACKS}.{name}", weights, is_transposed=True, **settings),
        Packed(f"{_STACKS}.{name}_bias", biases, **settings),
    )


def _rotary() -> tuple[Field, ...]:
    first, *others = rotary_fields(default_base=150000.0)
    return (replace(first, default=_POSITIONS), *others)


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    ConfigTable(
        "gpt-oss",
        (
            *sizes(201088, 2880, 2880, 36, 64, 131072, 8, norm_eps=1e-5),
            *_rotary(),
            Field("hidden_act", "silu", allowed=("silu",), reason=_ACTIVATION_REASON),
            Field("swiglu_alpha", GATE_FACTOR, allowed=(GATE_FACTOR,), reason=_ACTIVATION_REASON),
            Field(
                "swiglu_limit", FEATURE_LIMIT, allowed=(FEATURE_LIMIT,), reason=_ACTIVATION_REASON
            ),
            Field("head_dim", 64, head_dim),
            replace(ATTENTION_BIAS, default=True),
            Field("sliding_window", 128),
            Field("layer_types", None, _windows),
        ),
        {**FIXED, "activation": "clamped_swiglu", "attention_sinks": True},
        _DUPLICATES,
        parts={
            "experts": ConfigTable(
                "gpt-oss",
                (
                    Field("num_hidden_layers", 36),
                    Field("num_local_experts", 128, "num_experts", aliases=("num_experts",)),
                    Field("num_experts_per_tok", 4, "top_k"),
                    Field("intermediate_size", 2880, "ffn_hidden_size"),
                    *balanced(all_layers),
                ),
                {
                    "scoring": "softmax",
                    "normalize_top_k": True,
                    "linear_bias": True,
                    "router_bias": True,
                },
                build=ExpertsConfig,
            )
        },
    ),
    replace(
        LLAMA_NAMES,
        sinks="model.layers.{}.self_attn.sinks",
        experts=ExpertNames(router=f"{MLP}.router", up=_EXPERT[:2], down=_EXPERT[2]),
    ),
    ignored=OUTDATED,
    packed=(*_stack("gate_up_proj", _EXPERT[:2]), *_stack("down_proj", _EXPERT[2:])),
)
