"""Splits and blends with the floating-point numbers of Megatron-Core, for runs that must take its samples.

The default order uses exact integers instead (`blend.py`, `split_range`): a share of 1/10 is one tenth on every
machine, and more samples only continue fewer. Megatron-Core rounds doubles: "90,5,5" leaves 2 of 30 documents for
validation there and 1 here, and of two corpora that lag equally rounding says which is next. Neither is better for
training; whoever compares a run with one of Megatron-Core needs the latter.

Source: Megatron-Core core/datasets/blended_megatron_dataset_builder.py, blended_dataset.py, helpers.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import UnsupportedError

# windows that Megatron-Core builds of each corpus beyond its share (mid_level_dataset_surplus)
SURPLUS = 0.005


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide weights by their sum, as doubles.

    Raises:
        UnsupportedError: A weight is not positive, which Megatron-Core refuses.
    """
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UnsupportedError(
            f"weights of a blend in the order of Megatron must be finite and positive: {list(weights)}. Leave corpora "
            f"of weight 0 out, or use order 'passes'."
        )
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def split_as_megatron(count: int, weights: str) -> tuple[range, ...]:
    """Divide `count` sequences into training, validation and test at bounds that are rounded from doubles.

    Raises:
        UnsupportedError: There are more than three weights, or one is no decimal number.
    """
    parts = [part.strip() for part in weights.split(",")]
    if len(parts) > 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part, re.ASCII) for part in parts):
        raise UnsupportedError(
            f"split weights in the order of Megatron must be one to three decimal numbers such as '980,15,5': "
            f"{weights!r}."
        )
    shares = np.array([float(part) for part in parts] + [0.0] * (3 - len(parts)), dtype=np.float64)
    if not 0 < np.sum(shares) < math.inf:
        raise UnsupportedError(f"split weights must not all be zero, and their sum must be finite: {weights!r}.")
    bounds = [0.0]
    for share in (shares / np.sum(shares)).tolist():
        bounds.append(bounds[-1] + share)
    places = [round(bound * float(count)) for bound in bounds]
    return tuple(range(start, stop) for start, stop in zip(places, places[1:], strict=False))


def sizes_as_megatron(weights: Sequence[float], size: int) -> list[int]:
    """Count the windows that are built of each corpus for a blend of `size` windows; they decide its shuffle."""
    return [math.ceil(math.ceil(size * weight) * (1 + SURPLUS)) for weight in normalize(weights)]


def blend_as_megatron(weights: Sequence[float], size: int) -> npt.NDArray[np.int16]:
    """Choose the dataset of each of `size` samples: the first of those whose count lags most, in doubles."""
    return _choose(normalize(weights), size, [size] * len(weights))


def blend_exhaustively_as_megatron(sizes: Sequence[int]) -> npt.NDArray[np.int16]:
    """Choose the dataset of each sample so that each dataset is used once, spread over the whole."""
    total = float(sum(sizes))
    return _choose([float(size) / total for size in sizes], sum(sizes), list(sizes))


def _choose(weights: list[float], size: int, limits: list[int]) -> npt.NDArray[np.int16]:
    choices = np.empty(size, dtype=np.int16)
    counts = [0.0] * len(weights)
    open_datasets = [dataset for dataset, limit in enumerate(limits) if limit]
    for step in range(size):
        due = max(float(step), 1.0)
        best = open_datasets[0]
        most = weights[best] * due - counts[best]
        for dataset in open_datasets:
            lag = weights[dataset] * due - counts[dataset]
            if lag > most:
                best, most = dataset, lag
        choices[step] = best
        counts[best] += 1.0
        if counts[best] == limits[best]:
            open_datasets.remove(best)
    return choices
