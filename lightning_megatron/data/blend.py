"""Blends of datasets: each step draws from the dataset that lags most behind its share.

Counts and weights are integers, so that ties are exact and the lowest index wins. Megatron-Core
applies the same rule to doubles, whose rounding decides ties (see ``megatron_order.py``).

Source: Megatron-Core core/datasets/helpers.cpp (build_blending_indices,
build_exhaustive_blending_indices).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lightning_megatron.errors import UnsupportedError


def blend(weights: Sequence[float], size: int) -> npt.NDArray[np.int16]:
    """Return the dataset of each of ``size`` samples, in proportion to weights.

    The choices of a larger size begin with those of a smaller one.

    Args:
        weights: Weight of each dataset, exact in its decimal notation.
    """
    shares = integer_weights(weights)
    return choose(shares, size, [size] * len(shares), sum(shares))


def blend_exhaustively(sizes: Sequence[int]) -> npt.NDArray[np.int16]:
    """Return the dataset of each sample, so that every sample of every dataset is used once.

    The samples of each dataset are spread evenly over the result.
    """
    return choose(sizes, sum(sizes), sizes, sum(sizes))


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Convert weights to the smallest integers of the same proportion.

    The decimal notation of a weight is its exact value: 0.1 is one tenth.
    """
    if not weights or any(not math.isfinite(w) or w < 0 for w in weights) or not any(weights):
        raise UnsupportedError(
            "weights of a blend must be finite, not negative and not all zero: they are "
            f"{list(weights)}."
        )
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    shares = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def occurrences(choices: npt.NDArray[np.int16], num_datasets: int) -> npt.NDArray[np.int64]:
    """Return the sample index within the chosen dataset for each choice."""
    numbers = np.zeros(len(choices), dtype=np.int64)
    for dataset in range(num_datasets):
        chosen_at = np.flatnonzero(choices == dataset)
        numbers[chosen_at] = np.arange(len(chosen_at))
    return numbers


def choose(
    shares: Sequence[float], size: int, limits: Sequence[int], total: int
) -> npt.NDArray[np.int16]:
    """Return the dataset of each sample: the one that lags most behind its share.

    Args:
        shares: Share of each dataset, integers or doubles.
        limits: Largest number of samples of each dataset.
        total: Sum of the shares.
    """
    if len(shares) > np.iinfo(np.int16).max:
        raise UnsupportedError(
            f"a blend must have at most {np.iinfo(np.int16).max} datasets: it has {len(shares)}."
        )
    choices = np.empty(size, dtype=np.int16)
    counts = [0] * len(shares)
    open_datasets = [dataset for dataset, limit in enumerate(limits) if limit]
    for step in range(size):
        due = max(step, 1)
        # A dataset lags by share * due / total - count samples, here multiplied by total to stay in
        # integers. `max` returns the first of equal items, so the lowest index wins ties.
        best = max(
            open_datasets, key=lambda dataset: shares[dataset] * due - counts[dataset] * total
        )  # noqa: B023
        choices[step] = best
        counts[best] += 1
        if counts[best] == limits[best]:
            open_datasets.remove(best)
    return choices
