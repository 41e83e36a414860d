"""Rotary position settings of Hugging Face configurations, in current and earlier notation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.plan.rotary_scaling import RotaryScaling
from lightning_megatron.plan.settings import join_or, shown
from lightning_megatron.swap.families.field_kinds import KINDS, check_kind
from lightning_megatron.swap.families.fields import Field, Values

#: Names of kinds in earlier configurations.
_KIND_ALIASES = {"su": "longrope"}
#: Keys of ``rope_parameters`` by kind, besides the base, the kind and the rotated share.
_KEYS_OF_KIND: Mapping[str, str] = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate",
    "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor",
}
#: Keys without which positions of a kind cannot be computed.
_NEEDED: Mapping[str, str] = {
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor",
    "longrope": "short_factor long_factor",
}
_COMMON_KEYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


def rotary_fields(
    base_field: str = "rope_theta",
    share_field: str | None = None,
    default_share: float = 1.0,
    kind_aliases: Mapping[str, str] | None = None,
    default_base: float = 10000.0,
) -> tuple[Field, ...]:
    """Return the rules for all fields of rotary positions.

    Args:
        base_field: Field of the base in the earlier notation.
        share_field: Field of the rotated share of a head in the earlier notation; None if the
            family always rotates all elements of a head.
        default_share: Rotated share if the field is missing.
        kind_aliases: Further names of the kinds.
        default_base: Base if the field is missing.
    """
    rule = _rule(
        base_field,
        share_field,
        default_share,
        _KIND_ALIASES | dict(kind_aliases or {}),
        default_base,
    )
    names = {
        base_field,
        share_field or "partial_rotary_factor",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
    others = map(Field, sorted(names))
    return (Field("rope_parameters", target=rule), Field("rope_scaling"), *others)


def typed_rotary_fields(
    base: float,
    windows: Callable[[Values], Mapping[str, Any]],
    *,
    window_base: float = 10000.0,
    local: str | None = None,
) -> tuple[Field, ...]:
    """Return the rules for rotary positions that differ between kinds of layers.

    Args:
        base: Base of layers without a window if the field is missing.
        windows: Rule of the layers with a sliding window.
        window_base: Base of layers with a window if the field is missing.
        local: Field of the base of layers with a window in the earlier notation.
    """
    (rotary, *others) = rotary_fields(default_base=base)
    rule = rotary.target
    assert callable(rule), "the first field has the rule"

    def typed(values: Values) -> Mapping[str, Any]:
        parameters = values["rope_parameters"] or {}
        kinds = {"full_attention": {}, "sliding_attention": {}, **parameters}
        if len(kinds) > 2:
            reason = "layers with a window have positions of their own"
            legal = "a mapping for full_attention and for sliding_attention"
            raise _refusal("rope_parameters", parameters, legal, reason)
        for name, kind in kinds.items():
            check_kind(f"rope_parameters.{name}", kind, KINDS["rope_parameters"], "typed")
        full, sliding = ({} if kind is None else dict(kind) for kind in kinds.values())
        fields = dict(rule({**values, "rope_parameters": full}))
        if windows(values).get("sliding_window") is None:
            return fields
        kind = sliding.pop("rope_type", None) or "default"
        given_base = sliding.pop("rope_theta", None) or (values[local] if local else None)
        if kind != "default" or any(value is not None for value in sliding.values()):
            legal = "of rope_type default, with no key but rope_theta"
            reason = "angles of layers with a window are not scaled"
            raise _refusal("rope_parameters.sliding_attention", kind, legal, reason)
        local_base = float(given_base or window_base)
        is_common = local_base == fields["rotary_base"] and fields["rotary_scaling"] is None
        return fields if is_common else {**fields, "window_rotary_base": local_base}

    further = (Field(local),) if local else ()
    return (Field("rope_parameters", target=typed), *others, *further)


def _rule(
    base_field: str,
    share_field: str | None,
    default_share: float,
    kind_aliases: Mapping[str, str],
    default_base: float,
) -> Callable[[Values], Mapping[str, Any]]:
    def rule(values: Values) -> Mapping[str, Any]:
        parameters = values["rope_scaling"] or values["rope_parameters"] or {}
        if not isinstance(parameters, Mapping) or any(
            isinstance(value, Mapping) for value in parameters.values()
        ):
            raise _refusal(
                "rope_parameters",
                parameters,
                "one mapping for all layers",
                "all layers use the same rotary positions",
            )
        kind = _kind_of(parameters, kind_aliases)
        base = (
            parameters.get("rope_theta")
            or _agreed(values, base_field, "rope_theta")
            or default_base
        )
        share = (
            parameters.get("partial_rotary_factor")
            or _agreed(values, share_field, "partial_rotary_factor")
            or default_share
        )
        if share_field is None and share != 1.0:
            raise _refusal("partial_rotary_factor", share, "1.0", "this family rotates whole heads")
        head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        size = int(head_dim * share)
        if size % 2 or not size:
            reason = (
                f"it gives {size} of {head_dim} elements of a head, and rotary positions rotate "
                "pairs of elements"
            )
            raise _refusal(
                "partial_rotary_factor", share, "a share with an even number of elements", reason
            )
        scaling = None if kind == "default" else _scaling(kind, parameters, values)
        dim = size if size < head_dim else None
        return {"rotary_base": float(base), "rotary_dim": dim, "rotary_scaling": scaling}

    return rule


def _kind_of(parameters: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """Return the kind of the positions, and refuse parameters that it does not use."""
    named = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = aliases.get(named, named)
    if kind not in _KEYS_OF_KIND:
        raise _refusal(
            "rope_type", kind, join_or(list(_KEYS_OF_KIND)), "only these kinds are implemented"
        )
    for name in sorted(parameters.keys() - set(_KEYS_OF_KIND[kind].split()) - _COMMON_KEYS):
        if parameters[name] is not None and parameters[name] is not False:
            raise _refusal(
                f"rope_parameters.{name}",
                parameters[name],
                "left out",
                f"{kind} positions do not use it",
            )
    return kind


def _agreed(values: Values, name: str | None, second_name: str) -> Any:
    # Earlier configurations may give a number under two names.
    first = None if name is None else values[name]
    second = values[second_name]
    if None not in (first, second) and first != second:
        raise _refusal(second_name, second, f"equal to {name} ({first})", "both set the same value")
    return second if first is None else first


def _scaling(kind: Any, parameters: Mapping[str, Any], values: Values) -> RotaryScaling:
    longest = values["max_position_embeddings"]
    # A field of the configuration takes precedence over a key of the mapping.
    length = (
        values["original_max_position_embeddings"]
        or parameters.get("original_max_position_embeddings")
        or longest
    )
    for name in _NEEDED.get(kind, "").split():
        if parameters.get(name) is None:
            raise _refusal(
                f"rope_parameters.{name}",
                None,
                "given",
                f"{kind} positions cannot be computed without it",
            )
    factor = parameters.get("factor")
    factor = float(longest / length if factor is None else factor)
    if kind == "linear":
        return RotaryScaling(kind=kind, factor=factor)
    if kind == "llama3":
        return RotaryScaling(
            kind=kind,
            factor=factor,
            original_length=length,
            low_frequency_factor=float(parameters["low_freq_factor"]),
            high_frequency_factor=float(parameters["high_freq_factor"]),
        )
    attention = parameters.get("attention_factor")
    if kind == "longrope":
        return RotaryScaling(
            kind=kind,
            factor=factor,
            original_length=length,
            short_factors=tuple(parameters["short_factor"]),
            long_factors=tuple(parameters["long_factor"]),
            attention_factor=attention,
        )
    return RotaryScaling(
        kind=kind,
        factor=factor,
        original_length=length,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention(factor, parameters) if attention is None else attention,
    )


def _yarn_attention(factor: float, parameters: Mapping[str, Any]) -> float | None:
    mscale = parameters.get("mscale")
    mscale_all = parameters.get("mscale_all_dim")
    if not mscale or not mscale_all:
        return None
    if factor <= 1.0:
        return 1.0
    return float(
        (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all * math.log(factor) + 1.0)
    )


def _refusal(name: str, value: Any, legal: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} must be {legal}: it is {shown(value)}, and {reason}. Change it if the model "
        "allows it, or keep Hugging Face's own module."
    )
