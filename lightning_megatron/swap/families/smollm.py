"""SmolLM3: Llama with layers that do not rotate queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    ATTENTION_BIAS,
    FIXED,
    HEAD_DIM,
    OUTDATED,
    sizes,
    windows_of,
)
from lightning_megatron.swap.families.rotary import rotary_fields


def _rotating(values: Values) -> tuple[bool, ...]:
    # Despite its name, the field lists the layers that rotate.
    flags = values["no_rope_layers"]
    if flags is not None:
        return tuple(bool(flag) for flag in flags)
    every = values["no_rope_layer_interval"]
    return tuple((layer + 1) % every != 0 for layer in range(values["num_hidden_layers"]))


def _rotary_layers(values: Values) -> Mapping[str, Any]:
    rotating = _rotating(values)
    return {"rotary_layers": None if all(rotating) else rotating}


def _windows(values: Values) -> Mapping[str, Any]:
    width = values["sliding_window"] if values["use_sliding_window"] else None
    types = values["layer_types"]
    if types is None:
        types = [
            "full_attention" if rotates or width is None else "sliding_attention"
            for rotates in _rotating(values)
        ]
    return windows_of(types, width, values, "SmolLM3")


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    ConfigTable(
        "SmolLM3",
        (
            *sizes(128256, 2048, 11008, 36, 16, 32768, 4, tied=True, padding=128004),
            *rotary_fields(default_base=2e6),
            ACTIVATION,
            HEAD_DIM,
            ATTENTION_BIAS,
            Field("mlp_bias", False, "mlp_bias"),
            Field("no_rope_layers", None, _rotary_layers),
            Field("no_rope_layer_interval", 4),
            Field("use_sliding_window", False),
            Field("sliding_window", None),
            Field("layer_types", None, _windows),
        ),
        FIXED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)
