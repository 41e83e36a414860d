"""The StableLM family of `docs/families.md`, which the package lacks."""

from lightning_megatron.families import ConfigTable, DecoderNames, Family, Field, rotary_fields

_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    config=ConfigTable(
        fields=(
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "hidden_size"),
            Field("intermediate_size", "ffn_hidden_size"),
            Field("num_hidden_layers", "num_layers"),
            Field("num_attention_heads", "num_heads"),
            Field("num_key_value_heads", "num_kv_heads"),
            Field("max_position_embeddings", "max_seq_length"),
            Field("hidden_act", "activation", _ACTIVATIONS),
            Field("layer_norm_eps", "norm_eps"),
            Field("initializer_range", "init_std"),
            Field("tie_word_embeddings", "tie_embeddings"),
            Field("attention_dropout", "attention_dropout"),
            Field("use_qkv_bias", "qkv_bias"),
            Field("qk_layernorm", allowed=[False], reason="queries and keys have no LayerNorm"),
            Field(
                "use_parallel_residual",
                allowed=[False],
                reason="parallel blocks have a norm of each input",
            ),
            Field(
                "hidden_dropout",
                allowed=[0.0],
                reason="dropout would also apply to the embedding",
            ),
            *rotary_fields(partial=True),
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
