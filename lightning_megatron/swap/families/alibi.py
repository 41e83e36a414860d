"""BLOOM and MPT: decoders with ALiBi instead of position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.field_kinds import Factor
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values

#: BLOOM has no table of positions, so nothing bounds its rows (tokens).
_MAX_LENGTH = 1 << 20
_NO_DROPOUT = Field(
    "hidden_dropout", 0.0, allowed=(0.0,), reason="dropout would also apply to the embedding"
)

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
            Field(
                "apply_residual_connection_post_layernorm",
                False,
                allowed=(False,),
                reason="the residual stream bypasses the norms",
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
            {
                "slow_but_exact",
                "seq_length",
                "attention_softmax_in_fp32",
                "masked_softmax_fusion",
                "bias_dropout_fusion",
                "skip_bias_add",
                "skip_bias_add_qkv",
                "offset_alibi",
                "unk_token_id",
            }
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
        Field(
            "attn_type",
            "multihead_attention",
            allowed=("multihead_attention",),
            reason="each head has keys and values of its own, as in Hugging Face's class",
        ),
        Field(
            "attn_pdrop",
            0.0,
            allowed=(0.0,),
            reason="dropout of weights would also apply to the embedding",
        ),
        Field("clip_qkv", None, allowed=(None,), reason="queries, keys and values are not bounded"),
        Field("softmax_scale", None, "attention_scale", kind=Factor | None),
        Field("prefix_lm", False, allowed=(False,), reason="no position attends to a later one"),
        Field("qk_ln", False, allowed=(False,), reason="queries and keys are not normed"),
        Field(
            "attn_uses_sequence_id",
            False,
            allowed=(False,),
            reason="positions separate packed documents",
        ),
        Field("alibi", True, allowed=(True,), reason="the class of Hugging Face always has slopes"),
        # Hugging Face's class ignores it and uses 8.
        Field("alibi_bias_max", 8, allowed=(8,), reason="Hugging Face's class always uses 8"),
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
            Field(
                "expansion_ratio",
                4,
                allowed=(4,),
                reason="the MLP has 4 d_model features, as in Hugging Face's class",
            ),
            Field("no_bias", True, allowed=(True,), reason="Hugging Face's class has no biases"),
            Field("logit_scale", None, allowed=(None,), reason="Hugging Face's class ignores it"),
            Field(
                "embedding_fraction",
                1.0,
                allowed=(1.0,),
                reason="Hugging Face's class ignores it",
            ),
            Field("emb_pdrop", 0.0, allowed=(0.0,), reason="Hugging Face's class ignores it"),
            Field("resid_pdrop", 0.0, allowed=(0.0,), reason="Hugging Face's class ignores it"),
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
