"""GLM and GLM-4: neighbouring elements of half a head are rotated; GLM-4 norms all outputs."""

from __future__ import annotations

from dataclasses import replace

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    FIXED,
    OUTDATED,
    head_dim,
    sizes,
)
from lightning_megatron.swap.families.rotary import rotary_fields

_FIELDS = (
    *sizes(151552, 4096, 13696, 40, 32, 131072, 2, norm_eps=1.5625e-07, padding=151329),
    *rotary_fields(share_field="partial_rotary_factor", default_share=0.5),
    ACTIVATION,
    Field("head_dim", 128, head_dim),
    Field("attention_bias", True, lambda values: {"qkv_bias": bool(values["attention_bias"])}),
)
_FIXED = {**FIXED, "rotary_interleaved": True}
_NAMES = replace(LLAMA_NAMES, up=("model.layers.{}.mlp.gate_up_proj",))

GLM = Family(
    "glm",
    "GlmForCausalLM",
    ConfigTable("GLM", _FIELDS, _FIXED),
    _NAMES,
    ignored=OUTDATED,
)

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    ConfigTable("GLM-4", _FIELDS, {**_FIXED, "norm_position": "sandwich"}),
    replace(
        _NAMES,
        attention_output_norm="model.layers.{}.post_self_attn_layernorm",
        mlp_output_norm="model.layers.{}.post_mlp_layernorm",
    ),
    ignored=OUTDATED,
)
