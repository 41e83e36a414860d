"""Splits and blends with the rounding of Megatron-Core, for runs that must see the same samples.

The default order uses exact integers (``blend.py``, ``split_range``): results are the same on every
machine, and a larger number of samples extends the order. Megatron-Core rounds doubles, so the
split "90,5,5" of 30 documents has 2 documents for validation instead of 1, and rounding decides
which of two corpora with the same lag comes next. Neither order trains better; use this one to
compare a run with Megatron-Core.

Source: Megatron-Core core/datasets/blended_megatron_dataset_builder.py, blended_dataset.py,
helpers.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_megatron.data.blend import choose
from lightning_megatron.errors import UnsupportedError

# Fraction of additional windows that Megatron-Core builds of each corpus
# (mid_level_dataset_surplus).
SURPLUS = 0.005


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide weights by their sum in float64."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UnsupportedError(
            "weights of a blend in the order 'megatron' must be finite and positive: they are "
            f"{list(weights)}. Leave out corpora of weight 0, or use order 'passes'."
        )
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def split_as_megatron(count: int, weights: str) -> tuple[range, ...]:
    """Divide sequences into training, validation and test parts with float64 bounds."""
    parts = [part.strip() for part in weights.split(",")]
    if len(parts) > 3 or not all(
        re.fullmatch(r"\d+\.?\d*|\.\d+", part, re.ASCII) for part in parts
    ):
        raise UnsupportedError(
            "split weights in the order 'megatron' must be one to three decimal numbers such as "
            f"'980,15,5': they are {weights!r}."
        )
    shares = np.array([float(part) for part in parts] + [0.0] * (3 - len(parts)), dtype=np.float64)
    if not 0 < np.sum(shares) < math.inf:
        raise UnsupportedError(
            "split weights must not all be zero, and their sum must be finite: they are "
            f"{weights!r}."
        )
    bounds = [0.0]
    for share in (shares / np.sum(shares)).tolist():
        bounds.append(bounds[-1] + share)
    rounded = [round(bound * float(count)) for bound in bounds]
    return tuple(range(start, stop) for start, stop in zip(rounded, rounded[1:], strict=False))


def sizes_as_megatron(weights: Sequence[float], size: int) -> list[int]:
    """Return the number of windows to build of each corpus, on which its shuffle depends."""
    return [math.ceil(math.ceil(size * weight) * (1 + SURPLUS)) for weight in normalize(weights)]


def blend_as_megatron(weights: Sequence[float], size: int) -> npt.NDArray[np.int16]:
    """Return the dataset of each of ``size`` samples, in Megatron-Core's float64 arithmetic."""
    return choose(normalize(weights), size, [size] * len(weights), total=1)


def blend_exhaustively_as_megatron(sizes: Sequence[int]) -> npt.NDArray[np.int16]:
    """Return the dataset of each sample, so that every sample of every dataset is used once."""
    total = float(sum(sizes))
    return choose([float(size) / total for size in sizes], sum(sizes), sizes, total=1)
