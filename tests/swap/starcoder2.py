"""A family that is not among ours, as another package would describe it."""

from __future__ import annotations

from lightning_megatron.families import (
    ConfigTable,
    Family,
    Field,
    Names,
    one_from,
    rotary_fields,
)

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    config=ConfigTable(
        "StarCoder2",
        (
            Field("vocab_size", 49152, "vocab_size"),
            Field("hidden_size", 3072, "hidden_size"),
            Field("intermediate_size", 12288, "ffn_hidden_size"),
            Field("num_hidden_layers", 30, "num_layers"),
            Field("num_attention_heads", 24, "num_heads"),
            Field("num_key_value_heads", 2, "num_kv_heads"),
            Field("max_position_embeddings", 4096, "max_seq_length"),
            Field(
                "hidden_act",
                "gelu_pytorch_tanh",
                one_from("hidden_act", "activation", _ACTIVATIONS),
            ),
            Field("norm_epsilon", 1e-5, "norm_eps"),
            Field("initializer_range", 0.018042, "init_std"),
            Field("tie_word_embeddings", True, "tie_embeddings"),
            Field("attention_dropout", 0.0, "attention_dropout"),
            Field("sliding_window", None, "sliding_window"),
            Field(
                "use_bias", True, only=(True,), why="norms have biases, and so have all projections"
            ),
            Field(
                "residual_dropout",
                0.0,
                only=(0.0,),
                why="dropout would also apply to the embedding",
            ),
            Field(
                "embedding_dropout",
                0.0,
                only=(0.0,),
                why="dropout would also apply before the residual sums",
            ),
            *rotary_fields(),
        ),
        fixed={"norm": "layernorm", "position": "rotary", "bias": True},
    ),
    tensors=Names(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        attention_norm="model.layers.{}.input_layernorm",
        mlp_norm="model.layers.{}.post_attention_layernorm",
        qkv=tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
        output="model.layers.{}.self_attn.o_proj",
        up=("model.layers.{}.mlp.c_fc",),
        down="model.layers.{}.mlp.c_proj",
    ),
)
