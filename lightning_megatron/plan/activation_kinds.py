"""Activations of MLPs and of experts, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal[
    "gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"
]
"""Activation without a gate (``gelu`` is exact) or with one. ``clamped_swiglu`` is that of gpt-oss.
"""
MemoryKind: TypeAlias = Literal["gelu", "relu", "swiglu", "geglu", "clamped_swiglu"]
"""Activations with the same memory use."""

#: Activations that multiply one half of the features by the other.
GATED: frozenset[Activation] = frozenset(("swiglu", "geglu", "geglu_tanh", "clamped_swiglu"))
#: Kind with the same memory use.
MEMORY_OF: Mapping[Activation, MemoryKind] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu",
    "relu": "relu",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "geglu_tanh": "geglu",
    "clamped_swiglu": "clamped_swiglu",
}
