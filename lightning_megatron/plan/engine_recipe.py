"""Conversion of recipes of Transformer Engine to settings of ``FP8``, and the legal backends."""

from __future__ import annotations

from typing import Any, Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError

Backend = Literal["native", "te"]
"""Library whose matrix products and norms the layers of this package use."""

#: Methods by which recipes name their kind, with the names of that kind in this package.
_KINDS = {
    "delayed": "delayed",
    "float8_current_scaling": "tensorwise",
    "float8_block_scaling": "blockwise",
    "mxfp8": "mxfp8",
}
_NAMES = "DelayedScaling, Float8CurrentScaling, Float8BlockScaling or MXFP8BlockScaling"


def settings_of_recipe(recipe: Any) -> dict[str, Any]:
    """Return the settings of a recipe of Transformer Engine, by the names of ``FP8``.

    Args:
        recipe: Object of ``transformer_engine.common.recipe``.

    Raises:
        ParallelPlanError: If it is not such a recipe.
        UnsupportedError: If it has a setting without a counterpart here.
    """
    shown = type(recipe).__name__
    methods = [getattr(recipe, question, None) for question in _KINDS]
    if not all(callable(method) for method in methods):
        raise ParallelPlanError(
            f"fp8.te_recipe must be a recipe of Transformer Engine: {_NAMES}. It is of type "
            f"{shown}."
        )
    kinds = [
        name for name, method in zip(_KINDS.values(), methods, strict=True) if method and method()
    ]
    if not kinds:
        raise UnsupportedError(
            f"fp8.te_recipe cannot be {shown}: linear layers of this package support only "
            f"{_NAMES}. Use one of them."
        )
    settings = {"recipe": kinds[0], "format": _format(recipe)}
    for name in ("fp8_dpa", "fp8_mha", "backward_override"):
        if getattr(recipe, name, None):
            raise UnsupportedError(
                f"fp8.te_recipe ({shown}) cannot have {name}={getattr(recipe, name)!r}: only "
                "linear layers compute in 8 bits, and both of their passes do. Leave it out."
            )
    return settings | (_history(recipe) if kinds[0] == "delayed" else {})


def _format(recipe: Any) -> str:
    name = str(recipe.fp8_format.name).lower()
    if name not in ("hybrid", "e4m3"):
        raise UnsupportedError(
            f"fp8.te_recipe ({type(recipe).__name__}) must have the format HYBRID or E4M3: it is "
            f"{name.upper()}, with which inputs and weights would have 2 bits of mantissa. Use one "
            "of the two."
        )
    return name


def _history(recipe: Any) -> dict[str, int]:
    """Return the history of scales of earlier steps, which this package keeps itself."""
    legal = {
        "amax_compute_algo": ("max", "most_recent"),
        "scaling_factor_compute_algo": (None,),
        "reduce_amax": (True,),
    }
    for name, values in legal.items():
        value = getattr(recipe, name)
        if value not in values:
            raise UnsupportedError(
                f"fp8.te_recipe (DelayedScaling) cannot have {name}={value!r}: this package keeps "
                "the history itself, so that all ranks and checkpoints share it. Legal: "
                f"{' or '.join(map(repr, values))}."
            )
    is_last = recipe.amax_compute_algo == "most_recent"
    return {"history": 1 if is_last else recipe.amax_history_len, "margin": recipe.margin}
