"""GPT-2 and GPT-NeoX: decoders with LayerNorm and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.fields import (
    ConfigTable,
    Field,
    Values,
    only,
    translate_values,
)
from lightning_megatron.swap.families.rotary import rotary_fields

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def _dropout(values: Values) -> Mapping[str, Any]:
    embedding = values["embd_pdrop"]
    residual = values["resid_pdrop"]
    if embedding != residual:
        raise UnsupportedError(
            f"embd_pdrop must equal resid_pdrop: they are {embedding} and {residual}. The model of "
            f"this package has one probability for both. Set embd_pdrop to {residual}."
        )
    return {"hidden_dropout": residual}


def _bias(values: Values) -> Mapping[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias"), bool(values["attention_bias"]))


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    ConfigTable(
        "GPT-2",
        (
            Field("vocab_size", 50257, "vocab_size"),
            Field("n_positions", 1024, "max_seq_length"),
            Field("n_embd", 768, "hidden_size"),
            Field("n_layer", 12, "num_layers"),
            Field("n_head", 12, "num_heads"),
            Field("n_inner", None, "ffn_hidden_size"),
            Field(
                "activation_function",
                "gelu_new",
                translate_values("activation_function", "activation", _ACTIVATIONS),
            ),
            Field("layer_norm_epsilon", 1e-5, "norm_eps"),
            Field("initializer_range", 0.02, "init_std"),
            Field("embd_pdrop", 0.1),
            Field("resid_pdrop", 0.1, _dropout),
            Field("attn_pdrop", 0.1, "attention_dropout"),
            Field("tie_word_embeddings", True, "tie_embeddings"),
            Field(
                "scale_attn_weights",
                True,
                lambda v: {} if v["scale_attn_weights"] else {"attention_scale": 1.0},
            ),
            only(
                "scale_attn_by_inverse_layer_idx",
                False,
                "all layers scale their attention scores alike",
            ),
            only(
                "reorder_and_upcast_attn",
                False,
                "the attention kernel chooses the precision of the scores",
            ),
        ),
        {"norm": "layernorm", "position": "learned", "bias": True},
    ),
    DecoderNames(
        embedding="transformer.wte",
        position="transformer.wpe",
        final_norm="transformer.ln_f",
        attention_norm="transformer.h.{}.ln_1",
        mlp_norm="transformer.h.{}.ln_2",
        qkv=("transformer.h.{}.attn.c_attn",),
        output="transformer.h.{}.attn.c_proj",
        up=("transformer.h.{}.mlp.c_fc",),
        down="transformer.h.{}.mlp.c_proj",
        is_transposed=True,
    ),
    base="transformer.",
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    embedding="transformer.wte.weight",
)

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    ConfigTable(
        "GPT-NeoX",
        (
            Field("vocab_size", 50432, "vocab_size"),
            Field("hidden_size", 6144, "hidden_size"),
            Field("num_hidden_layers", 44, "num_layers"),
            Field("num_attention_heads", 64, "num_heads"),
            Field("intermediate_size", 24576, "ffn_hidden_size"),
            Field("hidden_act", "gelu", translate_values("hidden_act", "activation", _ACTIVATIONS)),
            Field("max_position_embeddings", 2048, "max_seq_length"),
            Field("initializer_range", 0.02, "init_std"),
            Field("layer_norm_eps", 1e-5, "norm_eps"),
            Field("attention_dropout", 0.0, "attention_dropout"),
            Field("hidden_dropout", 0.0, "hidden_dropout"),
            Field("tie_word_embeddings", False, "tie_embeddings"),
            Field("use_parallel_residual", True, "parallel_residual"),
            Field("attention_bias", True, _bias),
            *rotary_fields("rotary_emb_base", "rotary_pct", 0.25),
        ),
        {"norm": "layernorm", "position": "rotary", "bias": True},
        # Names of earlier code; Hugging Face's model reads the names above.
        frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob"}),
    ),
    DecoderNames(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        attention_norm="gpt_neox.layers.{}.input_layernorm",
        mlp_norm="gpt_neox.layers.{}.post_attention_layernorm",
        qkv=("gpt_neox.layers.{}.attention.query_key_value",),
        output="gpt_neox.layers.{}.attention.dense",
        up=("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
        down="gpt_neox.layers.{}.mlp.dense_4h_to_h",
        by_heads=True,
    ),
    base="gpt_neox.",
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
    renamed=((r"^embed_out\.", "lm_head."),),
    embedding="gpt_neox.embed_in.weight",
)

FAMILIES = (GPT2, GPT_NEOX)
