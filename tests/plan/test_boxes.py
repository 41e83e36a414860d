"""Boxes cover exactly the elements of a flat range."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ParallelPlanError
from lightning_megatron.plan.boxes import FlatBox, flat_range_boxes

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def flat_elements(shape: tuple[int, ...], box: FlatBox) -> list[int]:
    """List the flat indices of a box, one index at a time."""
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in product(*ranges)
    ]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
def test_boxes_cover_the_range_in_flat_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = flat_range_boxes(shape, start, stop)
    assert [i for box in boxes for i in flat_elements(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert flat_elements(shape, box) == list(range(box.start, box.stop))
        assert all(
            o >= 0 and o + n <= extent
            for o, n, extent in zip(box.offsets, box.sizes, shape, strict=True)
        )


@given(ranges())
def test_no_two_neighbouring_boxes_can_be_merged(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    for left, right in pairwise(flat_range_boxes(shape, start, stop)):
        differ = [
            d
            for d in range(len(shape))
            if (left.offsets[d], left.sizes[d]) != (right.offsets[d], right.sizes[d])
        ]
        mergeable = (
            len(differ) == 1
            and left.offsets[differ[0]] + left.sizes[differ[0]] == right.offsets[differ[0]]
        )
        assert not mergeable


def test_a_range_over_rows_has_a_partial_first_row_full_rows_and_a_partial_last_row() -> None:
    assert flat_range_boxes((4, 5), 3, 17) == [
        FlatBox((0, 3), (1, 2), 3),
        FlatBox((1, 0), (2, 5), 5),
        FlatBox((3, 0), (1, 2), 15),
    ]
    assert len(flat_range_boxes((4, 5, 6), 1, 119)) == 5


def test_scalars_have_one_box_and_empty_ranges_have_none() -> None:
    assert flat_range_boxes((), 0, 1) == [FlatBox((), (), 0)]
    assert flat_range_boxes((), 0, 0) == []
    assert flat_range_boxes((3, 0, 2), 0, 0) == []
    assert flat_range_boxes((3, 2), 4, 4) == []
    assert flat_range_boxes((3, 2), 0, 6) == [FlatBox((0, 0), (3, 2), 0)]


def test_billions_of_elements_need_five_boxes() -> None:
    boxes = flat_range_boxes((131072, 16384, 3), 12346, 6_000_000_001)
    assert len(boxes) == 5
    assert sum(prod(box.sizes) for box in boxes) == 6_000_000_001 - 12346


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_of_its_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(
        ParallelPlanError, match=r"which has 6 elements. Use 0 <= start <= stop <= 6"
    ):
        flat_range_boxes((3, 2), start, stop)
