"""Llama and families with its tensors: Mistral, Qwen2, Qwen3 and (fused) Phi-3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.fields import (
    ConfigTable,
    Field,
    Values,
    only,
    padding_id,
    refusal,
    translate_values,
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


def sizes(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    max_length: int,
    num_kv_heads: int | None = None,
    *,
    norm_eps: float = 1e-6,
    tied: bool = False,
    padding: int | None = None,
) -> tuple[Field, ...]:
    """Return the rules for the shared fields, with a family's defaults.

    Args:
        max_length: Longest sequence (tokens).
        num_kv_heads: Key/value heads; None means num_heads (heads).
        tied: Whether the output head shares the token embedding's weight.
        padding: Token whose lookups do not train its embedding vector; None without one.
    """
    return (
        Field("vocab_size", vocab_size, "vocab_size"),
        Field("hidden_size", hidden_size, "hidden_size"),
        Field("intermediate_size", intermediate_size, "ffn_hidden_size"),
        Field("num_hidden_layers", num_layers, "num_layers"),
        Field("num_attention_heads", num_heads, "num_heads"),
        Field("num_key_value_heads", num_kv_heads, _kv_heads),
        Field("max_position_embeddings", max_length, "max_seq_length"),
        Field("initializer_range", 0.02, "init_std"),
        Field("rms_norm_eps", norm_eps, "norm_eps"),
        Field("tie_word_embeddings", tied, "tie_embeddings"),
        # In these families lookups of this row do not train it.
        Field("pad_token_id", padding, padding_id),
        Field(
            "attention_dropout",
            0.0,
            lambda values: {"attention_dropout": values["attention_dropout"] or 0.0},
        ),
    )


def _kv_heads(values: Values) -> Mapping[str, Any]:
    return {"num_kv_heads": values["num_key_value_heads"] or values["num_attention_heads"]}


def head_dim(values: Values) -> Mapping[str, Any]:
    """Return the head size if it differs from the one that follows from other fields."""
    # Some versions of transformers store the value that follows from the sizes.
    size = values["head_dim"]
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


def windows_of(
    values: Values,
    family: str,
    is_windowed: Callable[[int], bool],
    *,
    has_windows: bool = True,
    keeps_all: bool = False,
) -> Mapping[str, Any]:
    """Return the attention window and the layers that have it.

    Args:
        is_windowed: Whether a layer has a window if the configuration lists no ``layer_types``,
            where each layer has ``full_attention`` or ``sliding_attention``.
        has_windows: Whether ``sliding_window`` counts.
        keeps_all: Whether to keep windows that are longer than every sequence, because layers with
            a window have other positions.
    """
    legal = ("full_attention", "sliding_attention")
    num_layers = values["num_hidden_layers"]
    width = values["sliding_window"] if has_windows else None
    types = values["layer_types"]
    if types is None:
        types = [legal[is_windowed(layer)] for layer in range(num_layers)]
    for layer, kind in enumerate(types):
        if kind not in legal:
            reason = "attention covers all previous positions, or a window of them"
            raise refusal(family, f"layer_types[{layer}]", kind, reason, legal)
    windowed = tuple(kind == "sliding_attention" for kind in types)
    if len(windowed) != num_layers or (any(windowed) and width is None):
        raise UnsupportedError(
            f"layer_types must have one entry for each of num_hidden_layers ({num_layers}), and "
            "sliding_attention only with use_sliding_window and sliding_window: it has "
            f"{len(windowed)} entries, {sum(windowed)} of them sliding, and the window is {width}. "
            "Correct the configuration."
        )
    if not any(windowed):
        return {}
    fields = {"sliding_window": width} if keeps_all else window(values)
    if fields["sliding_window"] is None or all(windowed):
        return fields
    return {**fields, "window_layers": windowed}


ACTIVATION = Field("hidden_act", "silu", translate_values("hidden_act", "activation", GATED))
HEAD_DIM = Field("head_dim", None, head_dim)
ATTENTION_BIAS = Field("attention_bias", False, _attention_bias)
#: Rules that most of these families have.
COMMON = (*rotary_fields(), ACTIVATION)


def like_llama(
    model_type: str,
    architecture: str,
    called: str,
    fields: tuple[Field, ...],
    names: DecoderNames = LLAMA_NAMES,
    *,
    parts: Mapping[str, ConfigTable] | None = None,
    packed: tuple[Packed, ...] = (),
    skipped: str = "",
    **fixed: Any,
) -> Family:
    """Return a family whose models have Llama's norms and rotary positions.

    Args:
        called: Name of the family, for messages.
        skipped: Names of further fields that do not affect training.
        fixed: Fields of this package that all models of the family share.
    """
    settings = {"norm": "rmsnorm", "position": "rotary", "bias": False, **fixed}
    table = ConfigTable(
        called, fields, settings, frozenset(skipped.split()), parts=dict(parts or {})
    )
    return Family(model_type, architecture, table, names, ignored=OUTDATED, packed=packed)


def _qwen_windows(values: Values) -> Mapping[str, Any]:
    has_windows = values["use_sliding_window"] and values["sliding_window"] is not None
    first = values["max_window_layers"]
    return windows_of(
        values, "Qwen", lambda layer: has_windows and layer >= first, has_windows=has_windows
    )


_NO_BIAS = "the family has no such bias"
_QWEN_SIZES = sizes(151936, 4096, 22016, 32, 32, 32768, 32)
_QWEN_WINDOWS = (
    Field("use_sliding_window", False),
    Field("sliding_window", 4096),
    Field("max_window_layers", 28),
    Field("layer_types", None, _qwen_windows),
)

LLAMA = like_llama(
    "llama",
    "LlamaForCausalLM",
    "Llama",
    (
        *sizes(32000, 4096, 11008, 32, 32, 2048),
        *COMMON,
        HEAD_DIM,
        ATTENTION_BIAS,
        Field("mlp_bias", False, "mlp_bias"),
        only(
            "rope_interleaved",
            False,
            "rotary positions pair the two halves of a head, not neighbouring elements",
            None,
        ),
    ),
)

MISTRAL = like_llama(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    (
        *sizes(32000, 4096, 14336, 32, 32, 131072, 8),
        *COMMON,
        HEAD_DIM,
        Field("sliding_window", 4096, window),
    ),
)

QWEN2 = like_llama(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2",
    (*_QWEN_SIZES, *COMMON, HEAD_DIM, *_QWEN_WINDOWS),
    qkv_bias=True,
)

QWEN3 = like_llama(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3",
    (*_QWEN_SIZES, *COMMON, Field("head_dim", 128, head_dim), ATTENTION_BIAS, *_QWEN_WINDOWS),
    qk_norm=True,
)

PHI3 = like_llama(
    "phi3",
    "Phi3ForCausalLM",
    "Phi-3",
    (
        *sizes(32064, 3072, 8192, 32, 32, 4096, norm_eps=1e-5, padding=32000),
        *rotary_fields(share_field="partial_rotary_factor", kind_aliases={"yarn": "longrope"}),
        ACTIVATION,
        Field("sliding_window", None, window),
        only("resid_pdrop", 0.0, "dropout would also apply to the embedding"),
        only("attention_bias", False, _NO_BIAS, None),
        only("mlp_bias", False, _NO_BIAS, None),
        only("lm_head_bias", False, _NO_BIAS, None),
    ),
    FUSED_NAMES,
    # There is no dropout after the embedding regardless of its field; the others belong to other
    # code.
    skipped="embd_pdrop interpolate_factor full_attn_mod",
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3)
