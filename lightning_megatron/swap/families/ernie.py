"""ERNIE 4.5 and Helium: Llama with rotations of neighbouring elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.swap.families.family import Family
from lightning_megatron.swap.families.fields import ConfigTable, Field, Values
from lightning_megatron.swap.families.llama import LLAMA_NAMES
from lightning_megatron.swap.families.llama_fields import (
    ACTIVATION,
    FIXED,
    OUTDATED,
    head_dim,
    sizes,
)
from lightning_megatron.swap.families.rotary import rotary_fields

_FIXED = {**FIXED, "rotary_interleaved": True}


def _biases(values: Values) -> Mapping[str, Any]:
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(values["use_bias"]))


ERNIE45 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    ConfigTable(
        "ERNIE 4.5",
        (
            *sizes(103424, 1024, 3072, 18, 16, 131072, 2, norm_eps=1e-5, tied=True, padding=0),
            *rotary_fields(default_base=500000.0),
            ACTIVATION,
            Field("head_dim", 128, head_dim),
            Field("use_bias", False, _biases, kind=bool | None),
        ),
        _FIXED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)

HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    ConfigTable(
        "Helium",
        (
            *sizes(48000, 2560, 7040, 24, 20, 4096, 20, norm_eps=1e-8, padding=3),
            *rotary_fields(default_base=100000.0),
            ACTIVATION,
            Field("head_dim", 128, head_dim),
            Field(
                "attention_bias", False, lambda values: {"qkv_bias": bool(values["attention_bias"])}
            ),
            Field("mlp_bias", False, "mlp_bias"),
        ),
        _FIXED,
    ),
    LLAMA_NAMES,
    ignored=OUTDATED,
)
