"""Configuration fields that Llama and families derived from it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families.fields import (
    Field,
    Values,
    padding_id,
    refusal,
    translate_values,
)

#: Activations of gated MLPs, and their names in this package.
GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}
#: Settings that all these families share.
FIXED = {"norm": "rmsnorm", "position": "rotary", "bias": False}
#: Tensors of earlier files that contain no weights.
OUTDATED = (r"(.*\.)?rotary_emb\.inv_freq",)


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
        vocab_size: Size of the vocabulary (tokens).
        hidden_size: Size D of the residual stream (elements).
        intermediate_size: Inner features of the MLP (elements).
        num_layers: Transformer blocks (layers).
        num_heads: Query heads (heads).
        max_length: Longest sequence (tokens).
        num_kv_heads: Key/value heads; None means num_heads (heads).
        norm_eps: Number that norms add to variances.
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
    return {
        "sliding_window": None
        if width is None or width >= values["max_position_embeddings"]
        else width
    }


def windows_of(
    types: Sequence[str],
    width: int | None,
    values: Values,
    family: str,
    *,
    keeps_all: bool = False,
) -> Mapping[str, Any]:
    """Return the attention window and the layers that have it.

    Args:
        types: Kind of attention of each layer: ``full_attention`` or ``sliding_attention``.
        width: Attention window of the sliding layers; None means none (tokens).
        values: Fields of the configuration.
        family: Name of the family, for errors.
        keeps_all: Whether to keep windows that are longer than every sequence, because layers with
            a window have other positions.

    Raises:
        UnsupportedError: For another kind, or if there is not one kind for each layer.
    """
    legal = ("full_attention", "sliding_attention")
    for layer, kind in enumerate(types):
        if kind not in legal:
            reason = "attention covers all previous positions, or a window of them"
            raise refusal(family, f"layer_types[{layer}]", kind, reason, legal)
    num_layers = values["num_hidden_layers"]
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
    fields = {"sliding_window": width}
    if not keeps_all:
        fields = dict(window({**values, "sliding_window": width}))
    if fields["sliding_window"] is None or all(windowed):
        return fields
    return {**fields, "window_layers": windowed}


ACTIVATION = Field("hidden_act", "silu", translate_values("hidden_act", "activation", GATED))
HEAD_DIM = Field("head_dim", None, head_dim)
ATTENTION_BIAS = Field("attention_bias", False, _attention_bias)
