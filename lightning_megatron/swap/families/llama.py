"""Llama and families with its tensors: Mistral, Qwen2, Qwen3 and (fused) Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.fields import (
    ConfigTable,
    Field,
    Values,
    only,
    padding_id,
    refusal,
)
from lightning_megatron.swap.families.rotary import rotary_fields
from lightning_megatron.swap.tensors.packed import Packed

#: Activations of gated MLPs, and their names in this package.
GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}
#: Tensors of earlier files that contain no weights.
OUTDATED = (r"(.*\.)?rotary_emb\.inv_freq",)
#: Sizes that most families have.
SIZES = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
    Field("max_position_embeddings", "max_seq_length"),
    Field("initializer_range", "init_std"),
    Field("tie_word_embeddings", "tie_embeddings"),
)
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


def head_dim(values: Values) -> Mapping[str, Any]:
    """Return the head size if it differs from the one that follows from other fields."""
    size = values.get("head_dim")
    heads = values["num_attention_heads"]
    return {"head_dim": None if size is None or size * heads == values["hidden_size"] else size}


def _attention_bias(values: Values) -> Mapping[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias"), bool(values["attention_bias"]))


def window(values: Values) -> Mapping[str, Any]:
    """Return the attention window, if it is shorter than a sequence can be."""
    width = values["sliding_window"]
    # Attention without a window is faster.
    is_shorter = width is not None and width < values["max_position_embeddings"]
    return {"sliding_window": width if is_shorter else None}


def _layer_windows(values: Values) -> Mapping[str, Any]:
    """Return the attention window and the layers that have it."""
    legal = ("full_attention", "sliding_attention")
    width = values["sliding_window"] if values.get("use_sliding_window", True) else None
    for layer, kind in enumerate(values["layer_types"]):
        if kind not in legal or (kind == legal[1] and width is None):
            reason = f"the width of windows is {width}"
            raise refusal(f"layer_types[{layer}]", kind, " or ".join(legal), reason)
    windowed = tuple(kind == legal[1] for kind in values["layer_types"])
    if not any(windowed):
        return {}
    # Layers with a window may have other positions, so a window that is too long is kept.
    return {"sliding_window": width, "window_layers": None if all(windowed) else windowed}


def _short_windows(values: Values) -> Mapping[str, Any]:
    fields = _layer_windows(values)
    return fields if fields and window(values)["sliding_window"] is not None else {}


ACTIVATION = Field("hidden_act", "activation", GATED)
HEAD_DIM = (Field("num_attention_heads", head_dim), Field("head_dim"))
ATTENTION_BIAS = Field("attention_bias", _attention_bias)
MLP_BIAS = Field("mlp_bias", "mlp_bias")
WINDOW = Field("sliding_window", window)
#: Windows of some layers.
WINDOWS = (Field("layer_types", _short_windows), Field("sliding_window"))
LONG_WINDOWS = (Field("layer_types", _layer_windows), Field("sliding_window"))
ATTENTION_DROPOUT = Field(
    "attention_dropout", lambda values: {"attention_dropout": values["attention_dropout"] or 0.0}
)
#: Rules that most of these families have, besides those of positions.
COMMON = (
    *SIZES,
    Field("num_key_value_heads", "num_kv_heads"),
    Field("rms_norm_eps", "norm_eps"),
    # In these families lookups of this row do not train it.
    Field("pad_token_id", padding_id),
    ATTENTION_DROPOUT,
    ACTIVATION,
    *HEAD_DIM,
)
LLAMA_FIELDS = (*COMMON, *rotary_fields(), ATTENTION_BIAS, MLP_BIAS)


def like_llama(
    model_type: str,
    architecture: str,
    fields: tuple[Field, ...],
    names: DecoderNames = LLAMA_NAMES,
    *,
    packed: tuple[Packed, ...] = (),
    skipped: str = "",
    **fixed: Any,
) -> Family:
    """Return a family whose models have Llama's norms and rotary positions.

    Args:
        skipped: Names of further fields that do not affect training.
        fixed: Fields of this package that all models of the family share.
    """
    settings = {"norm": "rmsnorm", "position": "rotary", "bias": False, **fixed}
    table = ConfigTable(fields, settings, skipped)
    return Family(model_type, architecture, table, names, ignored=OUTDATED, packed=packed)


_NO_BIAS = "the family has no such bias"
#: transformers derives the types of layers from them.
WINDOW_FIELDS = "use_sliding_window max_window_layers"

LLAMA = like_llama(
    "llama",
    "LlamaForCausalLM",
    (
        *LLAMA_FIELDS,
        only(
            "rope_interleaved",
            "rotary positions pair the two halves of a head, not neighbouring elements",
            False,
            None,
        ),
    ),
)

MISTRAL = like_llama("mistral", "MistralForCausalLM", (*COMMON, *rotary_fields(), WINDOW))

QWEN2 = like_llama(
    "qwen2",
    "Qwen2ForCausalLM",
    (*COMMON, *rotary_fields(), *WINDOWS),
    skipped=WINDOW_FIELDS,
    qkv_bias=True,
)

QWEN3 = like_llama(
    "qwen3",
    "Qwen3ForCausalLM",
    (*COMMON, *rotary_fields(), ATTENTION_BIAS, *WINDOWS),
    skipped=WINDOW_FIELDS,
    qk_norm=True,
)

PHI3 = like_llama(
    "phi3",
    "Phi3ForCausalLM",
    (
        *COMMON,
        *rotary_fields(partial=True),
        WINDOW,
        only("resid_pdrop", "dropout would also apply to the embedding", 0.0),
        only("attention_bias", _NO_BIAS, False, None),
        only("mlp_bias", _NO_BIAS, False, None),
        only("lm_head_bias", _NO_BIAS, False, None),
    ),
    FUSED_NAMES,
    # There is no dropout after the embedding regardless of its field; the others belong to other
    # code.
    skipped="embd_pdrop interpolate_factor full_attn_mod",
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)
