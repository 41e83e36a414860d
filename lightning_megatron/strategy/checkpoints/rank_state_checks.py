"""Validation of the per-rank values in a checkpoint: names, types and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import CorruptDataError
from lightning_megatron.groups.generators import StreamPosition

_MT19937_WORDS = 624
_POSITION = {
    item.name: bool if isinstance(item.default, bool) else int for item in fields(StreamPosition)
}


def _is_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def _is_words(value: Any, num_words: int) -> bool:
    is_tensor = (
        isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape == (num_words,)
    )
    return is_tensor and bool(((value >= 0) & (value < 1 << 32)).all())


def _is_number(value: Any, largest: int = 1 << 63) -> bool:
    return type(value) is int and 0 <= value <= largest


def _is_streams(value: Any) -> bool:
    if not isinstance(value, Mapping) or type(value.get("seed")) is not int:
        return False
    position = value.get("position")
    return isinstance(position, Mapping) and all(
        name in _POSITION and type(number) is _POSITION[name] and number >= 0
        for name, number in position.items()
    )


def _is_numpy(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.get("kind") == "MT19937"
        and _is_words(value.get("keys"), _MT19937_WORDS)
        and _is_number(value.get("position"), _MT19937_WORDS)
        and _is_number(value.get("has_gauss"), 1)
        and type(value.get("gauss")) is float
        and math.isfinite(value["gauss"])
    )


def _is_python(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.get("version") == 3
        and _is_words(value.get("internal"), _MT19937_WORDS + 1)
        and int(value["internal"][-1]) <= _MT19937_WORDS
        and (value.get("next_gauss") is None or type(value["next_gauss"]) is float)
    )


def _is_generators(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and _is_bytes(value.get("torch"))
        and _is_bytes(value.get("cuda", value["torch"]))
        and _is_numpy(value.get("numpy"))
        and _is_python(value.get("python"))
    )


_LEGAL: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "random": ("a seed and a position of whole numbers", _is_streams),
    "generators": ("states of the generators of torch, NumPy and Python", _is_generators),
    "dataloaders": ("a list", lambda value: isinstance(value, list)),
}


def check_rank_state(values: Mapping[str, Any], where: str) -> None:
    """Refuse per-rank values that are missing or invalid.

    Args:
        where: Description of the checkpoint for error messages.

    Raises:
        CorruptDataError: If a value is missing or invalid; the message names it.
    """
    for name, (legal, holds) in _LEGAL.items():
        if name not in values:
            raise _damaged(where, f"{name} is missing: it must be {legal}")
        if not holds(values[name]):
            raise _damaged(where, f"{name} must be {legal}: it is {str(values[name])[:200]!r}")


@contextmanager
def name_damaged_states(where: str) -> Iterator[None]:
    """Convert generators' errors about invalid states into errors that name the checkpoint."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        text = " ".join(str(error).split())[:200]
        raise _damaged(where, f"a random generator does not accept its state ({text})") from error


def _damaged(where: str, reason: str) -> CorruptDataError:
    return CorruptDataError(
        "the state of a rank in a checkpoint must be unchanged since it was saved: that of "
        f"{where} is damaged: {reason}. The fit would continue with other random numbers or data. "
        "Use another checkpoint."
    )
