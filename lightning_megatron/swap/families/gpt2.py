"""Decoders with LayerNorm: GPT-2, GPT-NeoX, and BLOOM and MPT with ALiBi instead of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.field_kinds import Factor
from lightning_megatron.swap.families.fields import (
    UNGATED,
    ConfigTable,
    Field,
    Values,
    only,
    translate_values,
)
from lightning_megatron.swap.families.llama import ATTENTION_BIAS
from lightning_megatron.swap.families.rotary import rotary_fields


def _dropout(values: Values) -> Mapping[str, Any]:
    embedding = values["embd_pdrop"]
    residual = values["resid_pdrop"]
    if embedding != residual:
        raise UnsupportedError(
            f"embd_pdrop must equal resid_pdrop: they are {embedding} and {residual}. The model of "
            f"this package has one probability for both. Set embd_pdrop to {residual}."
        )
    return {"hidden_dropout": residual}


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
                translate_values("activation_function", "activation", UNGATED),
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
            Field("hidden_act", "gelu", translate_values("hidden_act", "activation", UNGATED)),
            Field("max_position_embeddings", 2048, "max_seq_length"),
            Field("initializer_range", 0.02, "init_std"),
            Field("layer_norm_eps", 1e-5, "norm_eps"),
            Field("attention_dropout", 0.0, "attention_dropout"),
            Field("hidden_dropout", 0.0, "hidden_dropout"),
            Field("tie_word_embeddings", False, "tie_embeddings"),
            Field("use_parallel_residual", True, "parallel_residual"),
            replace(ATTENTION_BIAS, default=True),
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


#: BLOOM has no table of positions, so nothing bounds its rows (tokens).
_MAX_LENGTH = 1 << 20
_NO_DROPOUT = only("hidden_dropout", 0.0, "dropout would also apply to the embedding")

BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    ConfigTable(
        "BLOOM",
        (
            Field("vocab_size", 250880, "vocab_size"),
            Field("hidden_size", 64, "hidden_size", aliases=("n_embed",)),
            Field("n_layer", 2, "num_layers", aliases=("num_hidden_layers",)),
            Field("n_head", 8, "num_heads", aliases=("num_attention_heads",)),
            Field("layer_norm_epsilon", 1e-5, "norm_eps"),
            Field("initializer_range", 0.02, "init_std"),
            Field("attention_dropout", 0.0, "attention_dropout"),
            _NO_DROPOUT,
            Field("tie_word_embeddings", True, "tie_embeddings"),
            only(
                "apply_residual_connection_post_layernorm",
                False,
                "the residual stream bypasses the norms",
            ),
        ),
        {
            "norm": "layernorm",
            "position": "alibi",
            "alibi_skips_padding": True,
            "bias": True,
            "activation": "gelu_tanh",
            "embedding_norm": True,
            "max_seq_length": _MAX_LENGTH,
        },
        # These fields select a slower order of the same sums, give the length of the training's
        # rows, which the class does not read, or are names of earlier code.
        frozenset(
            """
            slow_but_exact seq_length attention_softmax_in_fp32 masked_softmax_fusion
            bias_dropout_fusion skip_bias_add skip_bias_add_qkv offset_alibi unk_token_id
            """.split()
        ),
    ),
    DecoderNames(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        final_norm="transformer.ln_f",
        attention_norm="transformer.h.{}.input_layernorm",
        mlp_norm="transformer.h.{}.post_attention_layernorm",
        qkv=("transformer.h.{}.self_attention.query_key_value",),
        output="transformer.h.{}.self_attention.dense",
        up=("transformer.h.{}.mlp.dense_h_to_4h",),
        down="transformer.h.{}.mlp.dense_4h_to_h",
        by_heads=True,
    ),
    base="transformer.",
    embedding="transformer.word_embeddings.weight",
)

_ATTENTION = ConfigTable(
    "MPT",
    (
        only(
            "attn_type",
            "multihead_attention",
            "each head has keys and values of its own, as in Hugging Face's class",
        ),
        only("attn_pdrop", 0.0, "dropout of weights would also apply to the embedding"),
        only("clip_qkv", None, "queries, keys and values are not bounded"),
        Field("softmax_scale", None, "attention_scale", kind=Factor | None),
        only("prefix_lm", False, "no position attends to a later one"),
        only("qk_ln", False, "queries and keys are not normed"),
        only("attn_uses_sequence_id", False, "positions separate packed documents"),
        only("alibi", True, "the class of Hugging Face always has slopes"),
        # Hugging Face's class ignores it and uses 8.
        only("alibi_bias_max", 8, "Hugging Face's class always uses 8"),
    ),
    {},
    frozenset({"attn_impl"}),
    build=dict,
)


def _attention(values: Values) -> Mapping[str, Any]:
    fields: Any = _ATTENTION(values["attn_config"] or {})
    return dict(fields)


MPT = Family(
    "mpt",
    "MptForCausalLM",
    ConfigTable(
        "MPT",
        (
            Field("vocab_size", 50368, "vocab_size"),
            Field("d_model", 2048, "hidden_size", aliases=("hidden_size",)),
            Field("n_layers", 24, "num_layers", aliases=("num_hidden_layers",)),
            Field("n_heads", 16, "num_heads", aliases=("num_attention_heads",)),
            Field("max_seq_len", 2048, "max_seq_length"),
            Field("layer_norm_epsilon", 1e-5, "norm_eps"),
            Field("initializer_range", 0.02, "init_std"),
            Field("tie_word_embeddings", True, "tie_embeddings"),
            Field("attn_config", None, _attention),
            only(
                "expansion_ratio", 4, "the MLP has 4 d_model features, as in Hugging Face's class"
            ),
            only("no_bias", True, "Hugging Face's class has no biases"),
            only("logit_scale", None, "Hugging Face's class ignores it"),
            only("embedding_fraction", 1.0, "Hugging Face's class ignores it"),
            only("emb_pdrop", 0.0, "Hugging Face's class ignores it"),
            only("resid_pdrop", 0.0, "Hugging Face's class ignores it"),
        ),
        {"norm": "layernorm", "position": "alibi", "bias": False, "activation": "gelu"},
        # The class always has slopes and one kind of norm, and has no other device.
        frozenset({"learned_pos_emb", "norm_type", "init_device"}),
    ),
    DecoderNames(
        embedding="transformer.wte",
        final_norm="transformer.norm_f",
        attention_norm="transformer.blocks.{}.norm_1",
        mlp_norm="transformer.blocks.{}.norm_2",
        qkv=("transformer.blocks.{}.attn.Wqkv",),
        output="transformer.blocks.{}.attn.out_proj",
        up=("transformer.blocks.{}.ffn.up_proj",),
        down="transformer.blocks.{}.ffn.down_proj",
    ),
    base="transformer.",
    embedding="transformer.wte.weight",
)

FAMILIES = (GPT2, GPT_NEOX, BLOOM, MPT)
