"""StarCoder2: LayerNorm, biases, rotary positions and grouped-query attention."""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, translate_values
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import HEAD_DIM, OUTDATED, sizes, window
from lightning_megatron.swap.families.rotary import rotary_fields

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_SIZES = sizes(49152, 3072, 12288, 30, 24, 4096, 2, tied=True)

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    ConfigTable(
        "StarCoder2",
        (
            *(
                replace(field, default=0.018042) if field.name == "initializer_range" else field
                for field in _SIZES
                if field.name != "rms_norm_eps"
            ),
            *rotary_fields(),
            HEAD_DIM,
            Field(
                "hidden_act",
                "gelu_pytorch_tanh",
                translate_values("hidden_act", "activation", _ACTIVATIONS),
            ),
            Field("norm_epsilon", 1e-5, "norm_eps"),
            Field("sliding_window", None, window),
            Field(
                "use_bias",
                True,
                allowed=(True,),
                reason="norms have biases, and so have all projections",
            ),
            Field(
                "residual_dropout",
                0.0,
                allowed=(0.0,),
                reason="dropout would also apply to the embedding",
            ),
            Field(
                "embedding_dropout",
                0.0,
                allowed=(0.0,),
                reason="dropout would also apply before the residual sums",
            ),
        ),
        {"norm": "layernorm", "position": "rotary", "bias": True},
        # Fields of earlier code: the class has one kind of norm and of MLP.
        frozenset({"norm_type", "mlp_type"}),
    ),
    replace(
        LLAMA_NAMES,
        up=("model.layers.{}.mlp.c_fc",),
        down="model.layers.{}.mlp.c_proj",
    ),
    ignored=OUTDATED,
)
