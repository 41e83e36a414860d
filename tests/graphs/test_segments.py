"""Segments run in order on named values, expand into their parts, and are split into pieces."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.graphs.segments import Segment, SegmentList, split


def add_one(x: Any) -> Any:
    return x + 1


def make_segment(name: str, reads: str, writes: str, **options: Any) -> Segment:
    """Build a segment that adds its inputs and 1; each letter of ``reads`` and ``writes`` is a name."""
    return Segment(name, lambda *x: sum(x) + 1, (*reads,), (*writes,), **options)


def make_list_with_transfer(first: str = "") -> SegmentList:
    """Build a list with a transfer from ``b`` to ``d``, which the segment of this name starts."""
    segments = [
        make_segment("a", "x", "a", scopes=("attention",)),
        make_segment("b", "a", "b", scopes=("preprocess",), is_static=first != "b", starts_transfer=True),
        make_segment("c", "a", "c", scopes=("preprocess",)),
        make_segment("d", "b", "d", scopes=("preprocess",)),
        make_segment("e", "cd", "x", scopes=("combine",)),
        make_segment("f", "xa", "y", scopes=("mlp",)),
    ]  # fmt: skip
    return SegmentList(segments, ("x",), ("y",))


def names_of(pieces: list[SegmentList]) -> list[str]:
    """Return the names of the segments of each piece; capital letters are static."""
    names = [(piece, "".join(segment.name for segment in piece)) for piece in pieces]
    return [text.upper() if piece.is_static else text for piece, text in names]


def test_missing_values_and_unknown_names_are_refused():
    first = Segment("first", abs, ("y",), ("z",))
    with pytest.raises(ValueError, match=r"'first' reads \['y'\], but available are \['x'\]"):
        SegmentList([first], ("x",), ("z",))
    with pytest.raises(ValueError, match=r"no segment writes \['out'\]"):
        SegmentList([first], ("y",), ("out",))
    with pytest.raises(ValueError, match=r"each of its inputs \('y',\): 2 were given"):
        SegmentList([first], ("y",), ("z",))((1, 2))
    parts = SegmentList([make_segment("p", "i", "o"), make_segment("q", "i", "r")], ("i",), ("o",))
    read_later = Segment("m", abs, ("x",), ("x",), parts=lambda: parts)
    with pytest.raises(ValueError, match=r"'q' of 'm' reads \['x'\].*Give the output another name"):
        SegmentList([read_later], ("x",), ("x",)).expand()
    with pytest.raises(UnsupportedError, match="one of embedding, attention.*all: 'attn'"):
        split(make_list_with_transfer(), scopes=["attn", "mlp"])
    with pytest.raises(UnsupportedError, match=r"\['z'\] are not among \['a', 'b'"):
        split(make_list_with_transfer(), cuts=["z", "a"])


def test_expand_replaces_a_segment_by_its_parts_and_calls_begin():
    events: list[str] = []
    segments = [
        Segment("one", add_one, ("hidden",), ("between",), scopes=("router",)),
        Segment("two", add_one, ("between",), ("hidden",), scopes=("experts",)),
    ]
    inner = SegmentList(segments, ("hidden",), ("hidden",), lambda: events.append("begin"))
    layer = Segment("layer", lambda x: inner((x,))[0], ("before",), ("after",), parts=lambda: inner)
    last = make_segment("last", "a", "b")
    outer = SegmentList([layer, last], ("before", "a"), ("after", "b"))
    expanded = outer.expand()
    assert [segment.name for segment in expanded] == ["layer.one", "layer.two", "last"]
    assert [segment.reads for segment in expanded] == [("before",), ("layer.between",), ("a",)]
    assert expanded.segments[1].writes == ("after",)
    assert expanded((1, 1)) == outer((1, 1)) == (3, 2)
    assert events == ["begin", "begin"]


def test_a_segment_with_a_compiled_module_is_not_expanded():
    module = nn.Linear(2, 2)
    static = make_segment("p", "x", "q", scopes=("router",))
    parts = SegmentList([static, make_segment("r", "q", "y", is_static=False)], ("x",), ("y",))
    whole = Segment("m", add_one, ("x",), ("y",), modules=(module,), parts=lambda: parts)
    outer = SegmentList([whole], ("x",), ("y",))
    assert [segment.name for segment in outer.expand()] == ["m.p", "m.r"]
    module.compile(backend="eager")
    (segment,) = outer.expand()
    assert (segment.name, segment.is_static, segment.scopes) == ("m", False, ("router",))
    assert outer.expand().parameters == (module.weight, module.bias)
    stays = Segment("w", add_one, ("x",), ("y",), parts=lambda: parts, stays_whole=True)
    assert [part.name for part in SegmentList([stays], ("x",), ("y",)).expand()] == ["w"]


#: Name of the eager segment, options, and the pieces.
SPLITS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("", {}, ["ABCDEF"]),
    ("b", {}, ["A", "bcd", "EF"]),
    ("", {"cuts": ["a", "e"]}, ["A", "BCDE", "F"]),
    ("", {"cuts": ["b"]}, ["ABCD", "EF"]),
    ("b", {"cuts": ["c", "f"]}, ["A", "bcd", "EF"]),
    ("", {"scopes": ["attention"]}, ["A", "bcdef"]),
    ("", {"scopes": ["mlp", "combine"]}, ["abcd", "EF"]),
    ("", {"scopes": ["preprocess"]}, ["a", "BCD", "ef"]),
    ("b", {"scopes": []}, ["abcdef"]),
]


def test_split_separates_static_and_eager_pieces():
    for eager, options, names in SPLITS:
        segments = make_list_with_transfer(eager)
        pieces = split(segments, **options)
        assert names_of(pieces) == names
        values: dict[str, Any] = {"x": 2}
        for piece in pieces:
            outputs = piece(tuple(values[name] for name in piece.inputs))
            values |= dict(zip(piece.outputs, outputs, strict=True))
        assert values["y"] == segments((2,))[0]
