"""Decoders with LayerNorm: GPT-2, GPT-BigCode, GPT-NeoX, and BLOOM and MPT with ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.families.family import DecoderNames, Family
from lightning_megatron.swap.families.fields import UNGATED, ConfigTable, Field, Values, only
from lightning_megatron.swap.families.llama import ATTENTION_BIAS, SIZES
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


#: Rules of GPT-2 that GPT-BigCode shares.
_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("n_positions", "max_seq_length"),
    Field("n_embd", "hidden_size"),
    Field("n_layer", "num_layers"),
    Field("n_head", "num_heads"),
    Field("n_inner", "ffn_hidden_size"),
    Field("activation_function", "activation", UNGATED),
    Field("layer_norm_epsilon", "norm_eps"),
    Field("initializer_range", "init_std"),
    Field("embd_pdrop"),
    Field("resid_pdrop", _dropout),
    Field("attn_pdrop", "attention_dropout"),
    Field("tie_word_embeddings", "tie_embeddings"),
    Field(
        "scale_attn_weights", lambda v: {} if v["scale_attn_weights"] else {"attention_scale": 1.0}
    ),
)
_SETTINGS = {"norm": "layernorm", "position": "learned", "bias": True}
_NAMES = DecoderNames(
    embedding="transformer.wte",
    position="transformer.wpe",
    final_norm="transformer.ln_f",
    attention_norm="transformer.h.{}.ln_1",
    mlp_norm="transformer.h.{}.ln_2",
    qkv=("transformer.h.{}.attn.c_attn",),
    output="transformer.h.{}.attn.c_proj",
    up=("transformer.h.{}.mlp.c_fc",),
    down="transformer.h.{}.mlp.c_proj",
)

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    ConfigTable(
        (
            *_FIELDS,
            only("scale_attn_by_inverse_layer_idx", "all layers scale scores alike", False),
            only("reorder_and_upcast_attn", "the kernel chooses the precision of scores", False),
        ),
        _SETTINGS,
    ),
    replace(_NAMES, is_transposed=True),
    base="transformer.",
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    embedding="transformer.wte.weight",
)

GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    config=ConfigTable(
        (*_FIELDS, only("multi_query", "all query heads share one key head", True)),
        {**_SETTINGS, "num_kv_heads": 1},
        # The class does not read them.
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 num_key_value_heads",
    ),
    tensors=_NAMES,
)

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    ConfigTable(
        (
            *SIZES,
            Field("hidden_act", "activation", UNGATED),
            Field("layer_norm_eps", "norm_eps"),
            Field("attention_dropout", "attention_dropout"),
            Field("hidden_dropout", "hidden_dropout"),
            Field("use_parallel_residual", "parallel_residual"),
            ATTENTION_BIAS,
            *rotary_fields(partial=True),
        ),
        {"norm": "layernorm", "position": "rotary", "bias": True},
        # Names of earlier code; Hugging Face's model reads the names above.
        "attention_probs_dropout_prob hidden_dropout_prob",
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

BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    ConfigTable(
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "hidden_size"),
            Field("n_layer", "num_layers"),
            Field("n_head", "num_heads"),
            Field("layer_norm_epsilon", "norm_eps"),
            Field("initializer_range", "init_std"),
            Field("attention_dropout", "attention_dropout"),
            Field("tie_word_embeddings", "tie_embeddings"),
            only("hidden_dropout", "dropout would also apply to the embedding", 0.0),
            only(
                "apply_residual_connection_post_layernorm",
                "the residual stream bypasses the norms",
                False,
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
        "slow_but_exact seq_length attention_softmax_in_fp32 masked_softmax_fusion "
        "bias_dropout_fusion skip_bias_add skip_bias_add_qkv offset_alibi unk_token_id",
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
    (
        only(
            "attn_type",
            "each head has keys and values of its own, as in Hugging Face's class",
            "multihead_attention",
        ),
        only("attn_pdrop", "dropout of weights would also apply to the embedding", 0.0),
        only("clip_qkv", "queries, keys and values are not bounded", None),
        Field("softmax_scale", "attention_scale"),
        only("prefix_lm", "no position attends to a later one", False),
        only("qk_ln", "queries and keys are not normed", False),
        only("attn_uses_sequence_id", "positions separate packed documents", False),
        only("alibi", "the class of Hugging Face always has slopes", True),
        # Hugging Face's class ignores it and uses 8.
        only("alibi_bias_max", "Hugging Face's class always uses 8", 8),
    ),
    {},
    "attn_impl",
)


MPT = Family(
    "mpt",
    "MptForCausalLM",
    ConfigTable(
        (
            Field("vocab_size", "vocab_size"),
            Field("d_model", "hidden_size"),
            Field("n_layers", "num_layers"),
            Field("n_heads", "num_heads"),
            Field("max_seq_len", "max_seq_length"),
            Field("layer_norm_epsilon", "norm_eps"),
            Field("initializer_range", "init_std"),
            Field("tie_word_embeddings", "tie_embeddings"),
            Field("attn_config", lambda values: _ATTENTION.settings(values["attn_config"])),
            only(
                "expansion_ratio", "the MLP has 4 d_model features, as in Hugging Face's class", 4
            ),
            only("no_bias", "Hugging Face's class has no biases", True),
            only("logit_scale", "Hugging Face's class ignores it", None),
            only("embedding_fraction", "Hugging Face's class ignores it", 1.0),
            only("emb_pdrop", "Hugging Face's class ignores it", 0.0),
            only("resid_pdrop", "Hugging Face's class ignores it", 0.0),
        ),
        {"norm": "layernorm", "position": "alibi", "bias": False, "activation": "gelu"},
        # The class always has slopes and one kind of norm, and has no other device.
        "learned_pos_emb norm_type init_device",
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

FAMILIES = (GPT2, GPT_BIGCODE, GPT_NEOX, BLOOM, MPT)
