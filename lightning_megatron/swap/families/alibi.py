"""BLOOM and MPT: decoders with ALiBi instead of position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.field_kinds import Factor
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values, only

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

FAMILIES = (BLOOM, MPT)
