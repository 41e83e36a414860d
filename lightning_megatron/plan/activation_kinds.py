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

#: Factor of the gate inside the sigmoid of ``clamped_swiglu``, which makes it close to GELU.
GATE_FACTOR = 1.702
#: Bound of the features of ``clamped_swiglu``: gates have it above only.
FEATURE_LIMIT = 7.0
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
