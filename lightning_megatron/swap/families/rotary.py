"""Rotary position settings of Hugging Face configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.settings import NotNegative, Range, coerced, join_or
from lightning_megatron.swap.families.fields import Field, Values, refusal

#: Keys of ``rope_parameters`` that have other names in this package.
_NAMES = {
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}
_STRETCH = ("factor", "original_max_position_embeddings")
#: Keys by kind, besides those that all kinds have.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_STRETCH, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_STRETCH, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": (*_STRETCH, "attention_factor", "short_factor", "long_factor"),
}
#: Keys without which positions of a kind cannot be computed.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
#: Fields of earlier configurations, which transformers has moved into ``rope_parameters``.
_EARLIER = "original_max_position_embeddings partial_rotary_factor rope_scaling rope_theta"
#: Keys from which the attention factor of yarn follows.
_YARN_KEYS = ("mscale", "mscale_all_dim")
_SHARE = Annotated[float, Range(above=0, maximum=1)]


def rotary_fields(*, partial: bool = False, typed: bool = False) -> tuple[Field, ...]:
    """Return the rules for all fields of rotary positions.

    Args:
        partial: Whether a configuration may rotate only a part of each head.
        typed: Whether layers with a sliding window have a mapping of their own.
    """

    def rule(values: Values) -> Mapping[str, Any]:
        given = values["rope_parameters"]
        kinds = {"full_attention", "sliding_attention"} if typed else set()
        if not isinstance(given, Mapping) or kinds != {
            key for key, value in given.items() if isinstance(value, Mapping)
        }:
            legal = f"a mapping with {join_or(sorted(kinds)) if kinds else 'no other mapping'}"
            raise refusal("rope_parameters", given, legal, "layers of a kind have equal positions")
        if not typed:
            return _positions(values, given, partial)
        positions = _positions(values, given["full_attention"], partial)
        local = _positions(values, given["sliding_attention"], partial)
        if local["rotary_scaling"] is not None:
            legal = "of rope_type default"
            reason = "angles of layers with a window are not scaled"
            raise refusal(
                "rope_parameters.sliding_attention", given["sliding_attention"], legal, reason
            )
        if "sliding_attention" not in values["layer_types"] or local == positions:
            return positions
        return {**positions, "window_rotary_base": local["rotary_base"]}

    return Field("rope_parameters", rule), *map(Field, _EARLIER.split())


def _positions(
    values: Values, parameters: Mapping[str, Any], may_be_partial: bool
) -> dict[str, Any]:
    kind = parameters.get("rope_type") or "default"
    if kind not in list(_KEYS):
        raise refusal("rope_type", kind, join_or(list(_KEYS)), "only these kinds are implemented")
    known = {*_KEYS[kind], *_COMMON_KEYS, *(_YARN_KEYS if kind == "yarn" else ())}
    for name in sorted(parameters.keys() - known):
        if parameters[name] is not None and parameters[name] is not False:
            reason = f"{kind} positions do not use it"
            raise refusal(f"rope_parameters.{name}", parameters[name], "left out", reason)
    share = coerced("partial_rotary_factor", parameters.get("partial_rotary_factor") or 1.0, _SHARE)
    if share != 1.0 and not may_be_partial:
        raise refusal("partial_rotary_factor", share, "1.0", "this family rotates whole heads")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    size = int(head_dim * share)
    if size % 2 or not size:
        reason = f"it gives {size} of {head_dim} elements of a head, which rotate in pairs"
        legal = "a share with an even number of elements"
        raise refusal("partial_rotary_factor", share, legal, reason)
    scaling = None if kind == "default" else _scaling(kind, parameters, values)
    dim = size if size < head_dim else None
    base = parameters.get("rope_theta")
    return {"rotary_base": base, "rotary_dim": dim, "rotary_scaling": scaling}


def _scaling(kind: Any, parameters: Mapping[str, Any], values: Values) -> RotaryScaling:
    for name in _NEEDED.get(kind, ()):
        if parameters.get(name) is None:
            reason = f"{kind} positions cannot be computed without it"
            raise refusal(f"rope_parameters.{name}", None, "given", reason)
    settings: dict[str, Any] = {
        _NAMES.get(name, name): parameters[name]
        for name in _KEYS[kind]
        if parameters.get(name) is not None
    }
    scaling = RotaryScaling(kind=kind, **settings)
    if "factor" not in settings and scaling.original_length is not None:
        growth = values["max_position_embeddings"] / scaling.original_length
        scaling = replace(scaling, factor=growth)
    of_kind, of_all = (coerced(n, parameters.get(n), NotNegative | None) for n in _YARN_KEYS)
    if kind == "yarn" and of_kind and of_all and scaling.attention_factor is None:
        growth = math.log(max(1.0, scaling.factor))
        attention = (0.1 * of_kind * growth + 1.0) / (0.1 * of_all * growth + 1.0)
        scaling = replace(scaling, attention_factor=attention)
    return scaling
