"""Blends follow Megatron's rule with exact integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.blend import blend, blend_exhaustively, integer_weights, occurrences
from lightning_megatron.errors import UnsupportedError


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.3, 0.7], [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]),
        ([1, 2, 3], [2, 1, 0, 2, 1, 2, 0, 2, 1, 2, 1, 2]),
        ([0.001, 0.999], [1, 0, 1, 1, 1]),
    ],
)
def test_the_dataset_that_lags_most_is_next(weights: list[float], expected: list[int]) -> None:
    assert blend(weights, len(expected)).tolist() == expected


def test_the_exhaustive_blend_ends_when_all_datasets_are_spent() -> None:
    assert blend_exhaustively([2, 3, 1]).tolist() == [1, 0, 2, 1, 0, 1]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
def test_the_exhaustive_blend_uses_every_sample_once(sizes: list[int]) -> None:
    choices = blend_exhaustively(sizes).tolist()
    assert [choices.count(dataset) for dataset in range(len(sizes))] == sizes


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    size=st.integers(1, 200),
)
def test_every_dataset_keeps_its_share_at_every_step(weights: list[int], size: int) -> None:
    choices = blend(weights, size).tolist()
    total = sum(weights)
    for stop in range(1, size + 1):
        counts = [choices[:stop].count(dataset) for dataset in range(len(weights))]
        lag = [
            abs(weight * stop - count * total)
            for weight, count in zip(weights, counts, strict=True)
        ]
        assert max(lag) <= len(weights) * total


def test_a_longer_blend_continues_a_shorter_one() -> None:
    assert blend([0.2, 0.5, 0.3], 500)[:123].tolist() == blend([0.2, 0.5, 0.3], 123).tolist()


def test_decimal_weights_become_exact_integer_ratios() -> None:
    assert integer_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert integer_weights([1e-3, 0.999]) == [1, 999]
    assert integer_weights([4, 2]) == [2, 1]


def test_occurrences_number_the_choices_of_each_dataset() -> None:
    assert occurrences(blend([1, 2, 3], 6), 3).tolist() == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_invalid_weights_raise(weights: list[float]) -> None:
    with pytest.raises(UnsupportedError, match="weights of a blend"):
        blend(weights, 3)
