"""Segments run in order on values by name, and are refused where a value is missing."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from torch import Tensor

from lightning_megatron.experts.segments import Segment, SegmentList


def test_values_go_from_segment_to_segment() -> None:
    segments = [
        Segment("both", lambda x: (x + 1, x * 2), ("x",), ("y", "z")),
        Segment("sum", operator.add, ("y", "z"), ("out",)),
    ]
    assert SegmentList(segments, ("x",), "out")(5) == 16


def test_a_value_that_nothing_reads_any_more_is_let_go() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        made = x + 1
        kept.append(weakref.ref(made))
        return made

    def look(x: Tensor) -> bool:
        gc.collect()
        return kept[0]() is None

    segments = [
        Segment("make", make, ("x",), ("y",)),
        Segment("use", torch.sum, ("y",), ("s",)),
        Segment("look", look, ("s",), ("is_gone",)),
    ]
    assert SegmentList(segments, ("x",), "is_gone")(torch.zeros(3))


def test_segments_that_read_what_is_not_there_are_refused() -> None:
    first = Segment("first", abs, ("y",), ("z",))
    with pytest.raises(ValueError, match=r"'first' reads \['y'\], available are \['x'\]"):
        SegmentList([first], ("x",), "z")
    with pytest.raises(ValueError, match="must write the output 'out'"):
        SegmentList([first], ("y",), "out")
