"""Gemma, Gemma 2 and Gemma 3: zero-centred norms, scaled embeddings, and later soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.fields import Field, Values, only, positive
from lightning_megatron.swap.families.llama import (
    ACTIVATION,
    ATTENTION_BIAS,
    COMMON,
    LLAMA_NAMES,
    LONG_WINDOWS,
    like_llama,
)
from lightning_megatron.swap.families.rotary import rotary_fields


def _bidirectional(values: Values) -> Mapping[str, Any]:
    if not values["use_bidirectional_attention"]:
        return {}
    has_windows = "sliding_attention" in values["layer_types"]
    # Half of the window lies before a token, and half after it.
    width = {"sliding_window": values["sliding_window"] // 2 + 1} if has_windows else {}
    return {"causal": False, **width}


_BIDIRECTIONAL = only(
    "use_bidirectional_attention", "no position attends to a later one", False, None
)
_SHARED = (
    *COMMON,
    ATTENTION_BIAS,
    Field("hidden_size", lambda values: {"embedding_scale": values["hidden_size"] ** 0.5}),
)
_LATER = (
    *(field for field in _SHARED if field != ACTIVATION),
    replace(ACTIVATION, name="hidden_activation"),
    Field(
        "query_pre_attn_scalar",
        lambda values: {"attention_scale": positive(values, "query_pre_attn_scalar") ** -0.5},
    ),
    *LONG_WINDOWS,
)
_NAMES = replace(
    LLAMA_NAMES,
    mlp_norm="model.layers.{}.pre_feedforward_layernorm",
    attention_output_norm="model.layers.{}.post_attention_layernorm",
    mlp_output_norm="model.layers.{}.post_feedforward_layernorm",
)
#: The classes read hidden_activation instead of hidden_act; the cache only affects generation.
_SKIPPED = "hidden_act cache_implementation"

GEMMA = like_llama(
    "gemma",
    "GemmaForCausalLM",
    (*_SHARED, *rotary_fields(), _BIDIRECTIONAL),
    # The class reads hidden_act instead.
    skipped="hidden_activation",
    norm_offset=1.0,
)

GEMMA2 = like_llama(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_LATER,
        *rotary_fields(),
        _BIDIRECTIONAL,
        Field("attn_logit_softcapping", "attention_soft_cap"),
        Field("final_logit_softcapping", "logit_soft_cap"),
    ),
    _NAMES,
    skipped=_SKIPPED,
    norm_offset=1.0,
    norm_position="sandwich",
)

GEMMA3 = like_llama(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_LATER,
        *rotary_fields(typed=True),
        Field("use_bidirectional_attention", _bidirectional),
        only(
            "attn_logit_softcapping",
            "scores have no bound, as in Hugging Face's class, which ignores the field",
            None,
        ),
        Field("final_logit_softcapping", "logit_soft_cap"),
    ),
    _NAMES,
    # transformers turns the pattern of published configurations into layer_types.
    skipped=f"{_SKIPPED} sliding_window_pattern",
    norm_offset=1.0,
    norm_position="sandwich",
    qk_norm=True,
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3)
