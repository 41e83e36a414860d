"""The StableLM family of `docs/families.md`, which the package lacks."""

from lightning_megatron.families import (
    ConfigTable,
    DecoderNames,
    Family,
    Field,
    rotary_fields,
    translate_values,
)

_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    config=ConfigTable(
        "StableLM",
        (
            Field("vocab_size", 50304, "vocab_size"),
            Field("hidden_size", 2560, "hidden_size"),
            Field("intermediate_size", 6912, "ffn_hidden_size"),
            Field("num_hidden_layers", 32, "num_layers"),
            Field("num_attention_heads", 32, "num_heads"),
            Field("num_key_value_heads", 32, "num_kv_heads"),
            Field("max_position_embeddings", 4096, "max_seq_length"),
            Field("hidden_act", "silu", translate_values("hidden_act", "activation", _ACTIVATIONS)),
            Field("layer_norm_eps", 1e-5, "norm_eps"),
            Field("initializer_range", 0.02, "init_std"),
            Field("tie_word_embeddings", False, "tie_embeddings"),
            Field("attention_dropout", 0.0, "attention_dropout"),
            Field("use_qkv_bias", False, "qkv_bias"),
            Field(
                "qk_layernorm",
                False,
                allowed=(False,),
                reason="queries and keys have no LayerNorm",
            ),
            Field(
                "use_parallel_residual",
                False,
                allowed=(False,),
                reason="parallel blocks have a norm of each input",
            ),
            Field(
                "hidden_dropout",
                0.0,
                allowed=(0.0,),
                reason="dropout would also apply to the embedding",
            ),
            *rotary_fields(share_field="partial_rotary_factor", default_share=0.25),
        ),
        fixed={
            "norm": "layernorm",
            "position": "rotary",
            "bias": True,
            "output_bias": False,
            "mlp_bias": False,
        },
    ),
    tensors=DecoderNames(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        attention_norm="model.layers.{}.input_layernorm",
        mlp_norm="model.layers.{}.post_attention_layernorm",
        qkv=tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
        output="model.layers.{}.self_attn.o_proj",
        up=tuple(f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up")),
        down="model.layers.{}.mlp.down_proj",
    ),
)
