"""Scopes: names of the parts of a model that CUDA graphs may capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from lightning_megatron.errors import UnsupportedError

SegmentScope = Literal[
    "embedding", "attention", "mlp", "router", "preprocess", "experts", "combine", "head"
]


def expanded_scopes(names: Iterable[str]) -> frozenset[str]:
    """Return a set of scopes, in which ``all`` stands for every scope.

    Args:
        names: Names of scopes, or ``all``.

    Raises:
        UnsupportedError: If a name is neither a scope nor ``all``.
    """
    known = get_args(SegmentScope)
    listed = tuple(names)
    wrong = [name for name in listed if name not in (*known, "all")]
    if wrong:
        raise UnsupportedError(
            f"a scope must be one of {', '.join(known)}, all: {', '.join(map(repr, wrong))}. These "
            "are the scopes of a model's segments."
        )
    return frozenset(known if "all" in listed else listed)
