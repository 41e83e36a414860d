"""Gemma, Gemma 2 and Gemma 3: zero-centred norms, scaled embeddings, and later soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.fields import (
    Field,
    Values,
    only,
    refusal,
    translate_values,
)
from lightning_megatron.swap.families.llama import (
    ATTENTION_BIAS,
    GATED,
    LLAMA_NAMES,
    head_dim,
    like_llama,
    sizes,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields, typed_rotary_fields


def _gemma_activation(values: Values) -> Mapping[str, Any]:
    # The first releases call the tanh approximation gelu.
    activation = values["hidden_act"]
    meant = "gelu_pytorch_tanh" if activation == "gelu" else activation
    hidden_activation = values["hidden_activation"]
    if hidden_activation is not None and hidden_activation != meant:
        reason = (
            f"hidden_act is {activation}, and versions of transformers disagree about which of the "
            "two counts"
        )
        raise refusal("Gemma", "hidden_activation", hidden_activation, reason, (meant, None))
    return translate_values("hidden_act", "activation", GATED)({**values, "hidden_act": meant})


def _every_other(values: Values) -> Mapping[str, Any]:
    return _windows(values, 2)


def _pattern(values: Values) -> Mapping[str, Any]:
    width = values["sliding_window"]
    if values["use_bidirectional_attention"] and width is not None:
        # Half of the window lies before a token, and half after it.
        values = {**values, "sliding_window": width // 2 + 1}
    return _windows(values, values["sliding_window_pattern"] or 6)


def _windows(values: Values, every: int) -> Mapping[str, Any]:
    """Return the windows of all layers; without layer types, every ``every``-th layer has none."""
    return windows_of(values, "Gemma", lambda layer: (layer + 1) % every > 0, keeps_all=True)


_BIDIRECTIONAL = only(
    "use_bidirectional_attention", None, "no position attends to a later one", False
)
_SCALED = Field(
    "hidden_size", 3072, lambda values: {"embedding_scale": values["hidden_size"] ** 0.5}
)
_LATER_FIELDS = (
    Field(
        "hidden_activation",
        "gelu_pytorch_tanh",
        translate_values("hidden_activation", "activation", GATED),
        kind=str,
    ),
    Field("head_dim", 256, head_dim),
    ATTENTION_BIAS,
    replace(_SCALED, default=2304),
    Field(
        "query_pre_attn_scalar",
        256,
        lambda values: {"attention_scale": values["query_pre_attn_scalar"] ** -0.5},
    ),
    Field("sliding_window", 4096),
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
    "Gemma",
    (
        *sizes(256000, 3072, 24576, 28, 16, 8192, 16, tied=True, padding=0),
        *rotary_fields(),
        Field("hidden_act", "gelu_pytorch_tanh", _gemma_activation),
        Field("hidden_activation", None),
        Field("head_dim", 256, head_dim),
        ATTENTION_BIAS,
        _BIDIRECTIONAL,
        _SCALED,
    ),
    norm_offset=1.0,
)

GEMMA2 = like_llama(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma 2",
    (
        *sizes(256000, 2304, 9216, 26, 8, 8192, 4, tied=True, padding=0),
        *rotary_fields(),
        *_LATER_FIELDS,
        _BIDIRECTIONAL,
        Field("layer_types", None, _every_other),
        Field("attn_logit_softcapping", 50.0, "attention_soft_cap"),
        Field("final_logit_softcapping", 30.0, "logit_soft_cap"),
    ),
    _NAMES,
    skipped=_SKIPPED,
    norm_offset=1.0,
    norm_position="sandwich",
)

GEMMA3 = like_llama(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma 3",
    (
        *sizes(262208, 2304, 9216, 26, 8, 131072, 4, tied=True, padding=0),
        *typed_rotary_fields(1e6, _pattern, local="rope_local_base_freq"),
        *_LATER_FIELDS,
        Field(
            "use_bidirectional_attention",
            False,
            lambda values: {"causal": not values["use_bidirectional_attention"]},
        ),
        Field("layer_types", None, _pattern),
        Field("sliding_window_pattern", None),
        only(
            "attn_logit_softcapping",
            None,
            "scores have no bound, as in Hugging Face's class, which ignores the field",
        ),
        Field("final_logit_softcapping", None, "logit_soft_cap"),
    ),
    _NAMES,
    skipped=_SKIPPED,
    norm_offset=1.0,
    norm_position="sandwich",
    qk_norm=True,
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3)
